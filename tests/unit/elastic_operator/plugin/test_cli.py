"""The edges of `kubectl etj` that need no cluster: flags, kubeconfigs, exit codes."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.client.credentials import Authorization
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.kubeconfig import load_config
from elastic_operator.plugin.main import main
from elastic_operator.plugin.options import make_parser


def write(path: Path, *, server: str = "https://127.0.0.1:1", name: str = "one", **user: Any) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": name, "user": user or {"token": f"token-of-{name}"}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"ns-{name}"}}],
        "current-context": name,
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "demo", "-o", "json", "status", "gpt"],
        ["status", "gpt", "-n", "demo", "-o", "json"],
        ["-n", "demo", "status", "-o", "json", "gpt"],
    ],
)
def test_flags_may_stand_before_or_after_the_verb(arguments: list[str]) -> None:
    options = make_parser().parse_args(arguments)
    assert (options.verb, options.name, options.namespace, options.output) == ("status", "gpt", "demo", "json")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["explode"],
        ["status"],
        ["plan", "gpt", "--gpus", "-1"],
        ["plan", "gpt", "--gpus", "4", "--lose", "n1"],
        ["logs", "gpt", "--rank", "1", "--index", "1"],
        ["status", "gpt", "-o", "xml"],
    ],
)
def test_a_wrong_command_line_is_refused_with_the_usage_code(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments, {})
    assert caught.value.code == Exit.USAGE
    assert "usage: kubectl etj" in capsys.readouterr().err


def test_the_version_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"], {})
    assert caught.value.code == Exit.OK
    assert capsys.readouterr().out == f"kubectl etj {importlib.metadata.version('elastic-training-operator')}\n"


def test_several_nodes_may_be_lost_in_one_flag_or_in_several() -> None:
    options = make_parser().parse_args(["plan", "gpt", "--lose", "n1", "n2:1", "--lose", "n3"])
    assert options.lose == [["n1", "n2:1"], ["n3"]]


def test_the_first_of_several_kubeconfigs_decides_and_the_others_add(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", name="one"), write(tmp_path / "b", name="two")
    environment = {"KUBECONFIG": f"{first}:{tmp_path / 'absent'}:{second}"}
    assert load_config(None, None, environment).namespace == "ns-one"
    assert load_config(None, "two", environment).namespace == "ns-two"


def test_paths_in_a_kubeconfig_are_relative_to_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a", **{"client-certificate": "me.crt", "client-key": "me.key"})
    assert load_config(str(path), None, {}).certificate_file == str(tmp_path / "me.crt")


def test_the_home_folder_is_looked_at_last(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    write(tmp_path / ".kube" / "config", name="home")
    assert load_config(None, None, {"HOME": str(tmp_path)}).context == "home"


def test_a_credential_plugin_of_the_newest_version_is_understood(tmp_path: Path) -> None:
    script = (
        "import json, os; info = json.loads(os.environ['KUBERNETES_EXEC_INFO']); "
        "print(json.dumps({'status': {'token': info['apiVersion'] + os.environ['MORE']}}))"
    )
    exec_ = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": ["-c", script],
        "env": [{"name": "MORE", "value": "+more"}],
    }
    credentials = load_config(str(write(tmp_path / "a", exec=exec_)), None, dict(os.environ))
    assert Authorization(credentials).header() == "Bearer client.authentication.k8s.io/v1+more"


@pytest.mark.parametrize(
    ("text", "context", "message"),
    [
        ("- a list", None, "expected a mapping"),
        ("{", None, "cannot be used"),
        ("clusters: []", None, "no current context|[Nn]o current context"),
        (None, "absent", "Context 'absent' not found"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, text: str | None, context: str | None, message: str
) -> None:
    path = tmp_path / "config"
    if text is None:
        write(path)
    else:
        path.write_text(text)
    with pytest.raises(PluginError, match=message) as caught:
        load_config(str(path), context, {})
    assert str(path) in str(caught.value)
    assert caught.value.code == Exit.UNREACHABLE


def test_no_kubeconfig_at_all_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"], {"HOME": str(tmp_path)}) == Exit.UNREACHABLE
    assert str(tmp_path / ".kube" / "config") in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_one_line_with_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    path = write(tmp_path / "config", server=f"https://127.0.0.1:{port}")
    assert main(["list", "--kubeconfig", str(path)], {}) == Exit.UNREACHABLE
    error = capsys.readouterr().err
    assert error.startswith(f"error: cluster https://127.0.0.1:{port} (context one) cannot be reached: ")
    assert error.count("\n") == 1


def test_a_loss_that_cannot_be_read_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "config")
    assert main(["plan", "gpt", "--lose", "n1:x", "--kubeconfig", str(path)], {}) == Exit.USAGE
    assert "expected NODE, or NODE:GPUS" in capsys.readouterr().err


def test_following_a_log_as_json_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "config")
    assert main(["logs", "gpt", "-f", "-o", "yaml", "--kubeconfig", str(path)], {}) == Exit.USAGE
    assert "cannot be combined" in capsys.readouterr().err
