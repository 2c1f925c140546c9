"""Reads of the API server without kubectl: their paths, and what is left to kubectl."""

import json
from pathlib import Path

import pytest

from testbed import reads


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["etj", "gpt", "-n", "team"], "/apis/elastictraining.dev/v1beta1/namespaces/team/elastictrainingjobs/gpt"),
        (["pods", "-n", "team", "-l", "a=b,c"], "/api/v1/namespaces/team/pods?labelSelector=a%3Db%2Cc"),
        (["node", "gpu-1"], "/api/v1/nodes/gpu-1"),
        (["lease", "-n", "team"], "/apis/coordination.k8s.io/v1/namespaces/team/leases"),
    ],
)
def test_a_read_is_the_request_that_kubectl_would_send(
    arguments: list[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Api:
        def __init__(self, kubeconfig: Path) -> None: ...

        def get(self, path: str) -> None:
            asked.append(path)

    monkeypatch.setattr(reads, "Api", Api)
    (tmp_path / "config").touch()
    value = reads.read(tmp_path / "config", arguments)
    assert asked == [path]
    assert value == ({} if len(arguments) % 2 == 0 else None), "no object, or a list that the API server does not know"


@pytest.mark.parametrize(
    "arguments",
    [["pods"], ["pods", "-A"], ["etj", "-n", ""], ["crd", "x"], ["pods,jobs", "-n", "a"], [], ["pod", "a", "b"]],
)
def test_what_only_kubectl_can_do_is_left_to_it(arguments: list[str], tmp_path: Path) -> None:
    assert reads.read(tmp_path / "nowhere", arguments) is None


def test_credentials_of_another_form_are_left_to_kubectl(tmp_path: Path) -> None:
    for content in ("apiVersion: v1", json.dumps({"clusters": [], "users": []})):
        (tmp_path / "config").write_text(content)
        assert reads.read(tmp_path / "config", ["node", "gpu-1"]) is None
