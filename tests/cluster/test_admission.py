"""A proxy that an admission policy puts before or after our container: exit codes, conversions and ends are ours."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import LIGHT, Run

pytestmark = pytest.mark.cluster

ADMISSION = "admissionregistration.k8s.io/v1"
ROOT = Path(__file__).parents[2]
PLACES = {"before": "/spec/containers/0", "after": "/spec/containers/-"}
GIVEN = "tests/golden/deepspeed-0.19.8/zero2-dp3/step-00000002"


def _policy(place: str, path: str) -> list[dict[str, Any]]:
    """Add a container that never ends to the pods with the label `proxy`."""
    proxy = 'Object.spec.containers{name: "proxy", image: first.image, command: ["sleep", "9999"]'
    proxy += ', imagePullPolicy: "Never"'
    mounts = "volumeMounts: first.volumeMounts.filter(m, m.name == 'host-usr').map(m, "
    mounts += "Object.spec.containers.volumeMounts{name: m.name, mountPath: m.mountPath, readOnly: true})}"
    patch = f'[JSONPatch{{op: "add", path: "{path}", value: {proxy}, {mounts}}}]'
    expression = patch.replace("first.", "object.spec.containers[0].")
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    return [
        {
            "apiVersion": ADMISSION,
            "kind": "MutatingAdmissionPolicy",
            "metadata": {"name": f"proxy-{place}"},
            "spec": {
                "matchConstraints": {"resourceRules": [rule], "objectSelector": {"matchLabels": {"proxy": place}}},
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
            },
        },
        {
            "apiVersion": ADMISSION,
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": f"proxy-{place}"},
            "spec": {"policyName": f"proxy-{place}"},
        },
    ]


@pytest.fixture
def policies(testbed: Any) -> Iterator[None]:
    objects = [item for place, path in PLACES.items() for item in _policy(place, path)]
    testbed.apply(*objects)
    yield
    for item in objects:
        testbed.kubectl("delete", item["kind"], item["metadata"]["name"], "--wait=false")


def _is_policy_active(run: Run, place: str) -> bool:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe", "labels": {"proxy": place}}}
    mount = {"name": "host-usr", "mountPath": "/usr"}
    container = {"name": "c", "image": "i", "volumeMounts": [mount]}
    pod["spec"] = {"containers": [container], "volumes": [{"name": "host-usr", "emptyDir": {}}]}
    text = run.cluster.kubectl(
        "create", "-n", run.namespace, "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod), check=False
    )
    return bool(text) and len(json.loads(text)["spec"]["containers"]) == 2


def test_a_proxy_before_or_after_the_container_changes_nothing(
    run_by_process: Run, checkpoints: Path, policies: None
) -> None:
    run = run_by_process
    shutil.copytree(ROOT / GIVEN, checkpoints / "old")
    training = shlex.join([*LIGHT, "10", "0", "0"])
    for place in PLACES:
        run.cluster.wait(lambda place=place: _is_policy_active(run, place), what=f"the policy {place}")
        run.submit(
            ["sh", "-c", f'[ "$ETJ_ATTEMPT" != 1 ] || exit 7; exec {training}'],
            name=place,
            template_labels={"proxy": place},
            parallelism={"zeroStage": 2},
            checkpoint={"claimName": "ckpt", "path": place, "intervalSeconds": 1000, "startFrom": "old"},
        )
    for place in PLACES:
        job = Run(run.cluster, run.namespace, place)
        status = job.until_phase("Complete", 150)
        failure = status["recoveries"][0]
        assert (failure["cause"], failure["exitCode"]) == ("PodFailed", 7), "not the proxy's, which goes on"
        assert "proxy goes on" in failure["message"]
        assert status["startedFrom"]["step"] == 2, "the conversion ended, and its report was read"
        assert (status["attempt"], status["progress"]["step"]) == (2, 10)
        own = ("-n", run.namespace, "-l", f"elastictraining.dev/job-name={place}")
        run.cluster.wait(lambda own=own: not run.cluster.get("pods", *own).get("items"), what="no pod that holds GPUs")
