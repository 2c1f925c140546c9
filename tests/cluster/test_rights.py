"""The operator's rights on a real API server: each of them is asked for, nothing beyond them is allowed.

The API server runs alone: no controllers, no kubelets, no other user. So what its audit log holds of the operator's
account is what the operator asks for.
"""

from __future__ import annotations

import base64
import copy
import datetime
import json
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Current
from elastic_operator.manifests.attempt import JobRef, attempt_objects
from reshard.topology import Topology
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from tests.cluster import releases
from tests.cluster.jobs import Operator
from tests.cluster.own_api_server import own_api_server
from tests.operator_rights import CLUSTER, JOBS, LEADER, NODES, SERVED, Right, asked, rights

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server]

ROOT = Path(__file__).parents[2]
HOME, TEAM = "operators-home", "team"
ACCOUNT = f"system:serviceaccount:{HOME}:{releases.NAME}"
NODE_LEASES = "kube-node-lease"
GPU = "amd.com/gpu"
SPEC: dict[str, Any] = {
    "accelerator": {"resource": GPU, "perNode": [2]},
    "nodes": {"min": 1, "max": 1},
    "batch": {"globalSamples": 20, "microSamples": 2},
    "checkpoint": {"claimName": "ckpt", "path": "gpt"},
    "recovery": {"drainSeconds": 1, "suspectSeconds": 600},
    "template": {"spec": {"containers": [{"name": "train", "image": "train:1"}]}},
}
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [ACCOUNT]}, {"level": "None"}],
}
KUEUE = {
    "workloads": "Workload",
    "resourceflavors": "ResourceFlavor",
    "workloadpriorityclasses": "WorkloadPriorityClass",
}
"""Kinds of Kueue that the operator uses, without Kueue; a test plays its part."""
QUEUE = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "low"}
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
OF_EVERY_ACCOUNT = {"selfsubjectreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews"}
"""Bound to all accounts by system:basic-user."""


class Api:
    """An API server that knows the kind, a node with two GPUs, two namespaces and a release of the chart."""

    def __init__(self, config: Path, audit: Path) -> None:
        self.config, self.audit, self.kubectl = config, audit, Kubectl(config)
        self.objects: list[dict[str, Any]] = []
        self.values: dict[str, Any] | None = None

    def install(self, **values: Any) -> None:
        """Apply what the chart grants, in the place of what was there before."""
        kinds = (
            "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding",
            "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
        )  # fmt: skip
        if values == self.values:
            return
        self.values = values
        if self.objects:
            self.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(self.objects))
        rendered = releases.render(HOME, {"rbac": {"aggregateRoles": False}, **values})
        self.objects = [item for item in rendered if item["kind"] in kinds]
        self.kubectl.apply(*self.objects)

    def as_operator(self, folder: Path) -> Path:
        """Write a kubeconfig with the operator's token."""
        config = yaml.safe_load(self.config.read_text())
        token = self.kubectl("create", "token", releases.NAME, "-n", HOME).strip()
        config["users"] = [{"name": item["name"], "user": {"token": token}} for item in config["users"]]
        path = folder / "operator.conf"
        path.write_text(json.dumps(config))
        return path

    def asked(self) -> dict[tuple[str, Right], set[int]]:
        """Return what the operator has asked for, by namespace, with the codes of the answers."""
        found: dict[tuple[str, Right], set[int]] = {}
        for line in self.audit.read_text().splitlines():
            entry = json.loads(line)
            what = entry.get("objectRef")
            if what is None or entry["user"]["username"] != ACCOUNT:
                continue
            resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
            right = Right(what.get("apiGroup", ""), resource, entry["verb"])
            codes = found.setdefault((what.get("namespace", ""), right), set())
            codes.add(entry.get("responseStatus", {}).get("code", 0))
        return {key: codes for key, codes in found.items() if key[1].resource not in OF_EVERY_ACCOUNT}

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.renew_node()
            if value := condition():
                return value
            time.sleep(0.3)
        raise AssertionError(f"waited {seconds} s for {what}")

    def renew_node(self) -> None:
        """Beat for the kubelet that is not there."""
        patch = json.dumps({"spec": {"renewTime": now()}})
        self.kubectl("patch", "lease", "gpu-1", "-n", NODE_LEASES, "--type=merge", "-p", patch)

    def job(self, namespace: str = TEAM) -> dict[str, Any]:
        return self.kubectl.get("etj", "gpt", "-n", namespace)

    def clear(self) -> None:
        """Remove what a test has left; no garbage collector does."""
        kinds = "etj,jobs,pods,leases,poddisruptionbudgets,roles,rolebindings,services,events,controllerrevisions"
        kinds += ",workloads.kueue.x-k8s.io"
        now = ("--grace-period=0", "--force", "--wait=false")
        # The operator deletes a job in the foreground, and no garbage collector lets it go.
        free = '{"metadata":{"finalizers":null}}'
        self.kubectl("patch", "etj", "gpt", "-n", TEAM, "--type=merge", "-p", free, check=False)
        self.kubectl("delete", kinds, "--all", "-n", TEAM, *now, check=False)
        accounts = ("serviceaccounts", "-l", "elastictraining.dev/job-name")
        self.kubectl("delete", *accounts, "-n", TEAM, *now, check=False)

    def phase(self) -> str:
        return str(self.job().get("status", {}).get("phase", ""))


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def training_job(namespace: str = TEAM, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "elastictraining.dev/v1beta1",
        "kind": "ElasticTrainingJob",
        "metadata": {"name": "gpt", "namespace": namespace},
        "spec": {**SPEC, **spec},
    }


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("audit")
    (folder / "policy.yaml").write_text(yaml.safe_dump(AUDIT))
    flags = (
        f"--audit-policy-file={folder}/policy.yaml",
        f"--audit-log-path={folder}/audit.log",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
    )
    with own_api_server(*flags) as kubectl:
        found = Api(kubectl.kubeconfig, folder / "audit.log")
        found.kubectl.apply(*map(_kueue_kind, KUEUE))
        for plural in KUEUE:
            found.kubectl.wait_established(f"{plural}.kueue.x-k8s.io")
        found.kubectl.apply(_kueue("ResourceFlavor", "gpus", spec={}), _kueue("WorkloadPriorityClass", "low", value=10))
        for name in (HOME, TEAM):
            found.kubectl("create", "namespace", name)
            found.kubectl("create", "serviceaccount", "default", "-n", name)
        _make_claims(found)
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-1"}}
        lease = {
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "gpu-1", "namespace": NODE_LEASES},
            "spec": {"holderIdentity": "gpu-1", "leaseDurationSeconds": 40, "renewTime": now()},
        }  # fmt: skip
        found.kubectl.apply(node, lease)
        amounts = {GPU: "2", "cpu": "8", "memory": "8Gi", "pods": "110"}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastTransitionTime": now(),
        }
        status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
        found.kubectl("patch", "node", "gpu-1", "--subresource=status", "--type=merge", "-p", json.dumps(status))
        yield found


def _make_claims(api: Api) -> None:
    """Make the claim ckpt with its volume, and the claim data, whose class waits for pods; nobody binds them here."""
    common = {"accessModes": ["ReadWriteMany"]}
    volume = {**common, "storageClassName": "", "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/nowhere"}}
    request = {**common, "resources": {"requests": {"storage": "1Gi"}}}
    storage_class = {"provisioner": "csi.example", "volumeBindingMode": "WaitForFirstConsumer"}
    claims = {"ckpt": {"storageClassName": "", "volumeName": "ckpt"}, "data": {"storageClassName": "later"}}
    api.kubectl.apply(
        {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "later"}, **storage_class},
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "ckpt"}, "spec": volume},
        *(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": TEAM},
                "spec": {**request, **spec},
            }
            for name, spec in claims.items()
        ),
    )
    bound = json.dumps({"status": {"phase": "Bound"}})
    api.kubectl("patch", "pvc", "ckpt", "-n", TEAM, "--subresource=status", "--type=merge", "-p", bound)


def _kueue_kind(plural: str) -> dict[str, Any]:
    """Return the definition of one of Kueue's kinds, which takes any field."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.kueue.x-k8s.io"},
        "spec": {
            "group": "kueue.x-k8s.io",
            "names": {"kind": KUEUE[plural], "plural": plural, "singular": KUEUE[plural].lower()},
            "scope": "Namespaced" if plural == "workloads" else "Cluster",
            "versions": [{**version, "subresources": {"status": {}}}],
        },
    }


def _kueue(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, **fields}


def _admit(api: Api, name: str) -> None:
    """Do what Kueue does for a Workload."""
    flavors = {GPU: "gpus"}
    admission = {"clusterQueue": "q", "podSetAssignments": [{"name": "workers", "count": 1, "flavors": flavors}]}
    conditions = [
        {"type": type_, "status": "True", "reason": type_, "message": "", "lastTransitionTime": now()}
        for type_ in ("QuotaReserved", "Admitted")
    ]
    status = json.dumps({"status": {"admission": admission, "conditions": conditions}})
    api.kubectl("patch", "workload", name, "-n", TEAM, "--subresource=status", "--type=merge", "-p", status)


def _workload(api: Api, name: str) -> dict[str, Any]:
    return api.kubectl.get("workload", name, "-n", TEAM)


def _get_quota(api: Api) -> None:
    """Queue a job: a Workload of somebody else has its name at first."""
    foreign = _kueue("Workload", "gpt-q1", spec={})
    foreign["metadata"]["namespace"] = TEAM
    api.kubectl.apply(foreign)
    job = training_job()
    job["metadata"]["labels"] = QUEUE
    api.kubectl.apply(job)
    group = "kueue.x-k8s.io"
    api.wait("a look at the Workload", lambda: any(r == (group, "workloads", "get") for _, r in api.asked()))
    api.kubectl("delete", "workload", "gpt-q1", "-n", TEAM)
    api.wait("the Workload", lambda: _owners(_workload(api, "gpt-q1")))
    assert not api.kubectl.get("job", "gpt-a1", "-n", TEAM)
    _admit(api, "gpt-q1")


def _has_told_start(api: Api) -> bool:
    return any(item["type"] == "PodsReady" for item in _workload(api, "gpt-q1")["status"]["conditions"])


def _leave_queue(api: Api) -> None:
    """Suspend the job for a moment, and take it out of its queue."""
    for suspend in (True, False):
        patch = json.dumps({"spec": {"suspend": suspend}})
        api.kubectl("patch", "etj", "gpt", "-n", TEAM, "--type=merge", "-p", patch)
        active = not suspend
        api.wait(f"active={active}", lambda active=active: _workload(api, "gpt-q1")["spec"]["active"] is active)  # type: ignore[misc]
    api.kubectl("label", "etj", "gpt", "-n", TEAM, *(f"{label}-" for label in QUEUE))
    api.wait("the Workload to go", lambda: not _workload(api, "gpt-q1"))


def _owners(item: dict[str, Any]) -> list[Any]:
    """Return the owners of an object; none where it does not exist."""
    return list(item.get("metadata", {}).get("ownerReferences", ()))


def live(api: Api, folder: Path, served: str | None) -> None:
    """Let an operator serve a job, and do everything that it may have to do for one.

    Args:
        served: the one namespace that it serves; None for all.
    """
    api.audit.write_text("")
    log = folder / "operator.log"
    arguments = ("--lease-namespace", HOME, "--stop-grace-seconds=0", "--node-stable-seconds=1")
    process = Operator(api.as_operator(folder), served, log, *arguments)
    try:
        # A job that waits for more nodes than there are: the operator asks which of the two is ahead.
        # The volume of one of its claims is there, that of the other one would be made for its pods.
        pod = {**SPEC["template"]["spec"], "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]}
        large = training_job(
            nodes={"min": 5, "max": 5},
            checkpoint={"claimName": "ckpt", "path": "large"},
            template={"spec": pod},
        )
        api.kubectl.apply({**large, "metadata": {"name": "large", "namespace": TEAM}})
        api.wait("the other job to wait", lambda: "Waiting" in _phases(api))
        _get_quota(api)
        made = api.wait("attempt 1", lambda: api.kubectl.get("job", "gpt-a1", "-n", TEAM))
        # Without a pod for a while, the operator asks why.
        api.wait(
            "the reasons to be asked for", lambda: any(right == ("", "events", "list") for _, right in api.asked())
        )
        api.kubectl("annotate", "etj", "gpt", "-n", TEAM, "elastictraining.dev/drain-requested=1")
        api.wait("the first answer", lambda: api.job()["status"].get("drainRequest") == "1")
        api.kubectl("annotate", "etj", "gpt", "-n", TEAM, "elastictraining.dev/drain-requested=2", "--overwrite")
        api.wait("the same answer", lambda: api.job()["status"].get("drainRequest") == "2")

        api.kubectl.apply(_pod(made))
        running = {"status": {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]}}
        api.kubectl(
            "patch", "pod", "gpt-a1-0", "-n", TEAM, "--subresource=status", "--type=merge", "-p", json.dumps(running)
        )
        notes = {"elastictraining.dev/phase": "Training", "elastictraining.dev/step": "1"}
        notes |= {"elastictraining.dev/first-step-time": now(), "elastictraining.dev/step-time": now()}

        def beats() -> bool:
            beat = {"metadata": {"annotations": notes}, "spec": {"renewTime": now(), "holderIdentity": "rank-0"}}
            api.kubectl("patch", "lease", "gpt-a1", "-n", TEAM, "--type=merge", "-p", json.dumps(beat))
            return api.phase() == "Running"

        api.wait("the job to run", beats)
        api.wait("Kueue to be told that the pods have started", lambda: beats() and _has_told_start(api))
        api.kubectl(
            "patch", "etj", "gpt", "-n", TEAM, "--type=merge", "-p", '{"spec":{"recovery":{"hangSeconds":999}}}'
        )
        second = api.job()["metadata"]["generation"]
        api.wait("the newer spec to be kept", lambda: beats() and _revisions(api) == [second])
        # A Job of somebody else has the name of the next attempt: the operator looks whose it is, and waits.
        api.kubectl.apply(_foreign_job("gpt-a2"))
        # Rank 0 does not answer: the drain ends by its time, and the pod is taken down.
        api.kubectl("annotate", "etj", "gpt", "-n", TEAM, "elastictraining.dev/drain-requested=3", "--overwrite")
        api.wait("attempt 1 to be fenced", lambda: not api.kubectl.get("lease", "gpt-a1", "-n", TEAM))
        api.wait("a look at the Job", lambda: any(right == ("batch", "jobs", "get") for _, right in api.asked()))
        api.kubectl("delete", "job", "gpt-a2", "-n", TEAM, "--wait=false")
        # Between the two Jobs of that name there may be none.
        api.wait("attempt 2", lambda: _owners(api.kubectl.get("job", "gpt-a2", "-n", TEAM)))
        _leave_queue(api)
        # The time of the job is over, and then the time for which it stays.
        over = {"spec": {"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 0}}
        api.kubectl("patch", "etj", "gpt", "-n", TEAM, "--type=merge", "-p", json.dumps(over))
        api.wait("the deletion", lambda: "deletionTimestamp" in api.job()["metadata"])
    finally:
        process.stop()
        text = log.read_text()
        print(text)
        api.clear()
    assert "forbidden" not in text.lower()


def _foreign_job(name: str) -> dict[str, Any]:
    pod = {"restartPolicy": "Never", "containers": [{"name": "a", "image": "a"}]}
    meta = {"name": name, "namespace": TEAM}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": {"template": {"spec": pod}}}


def _pod(job: dict[str, Any]) -> dict[str, Any]:
    """Return the pod that the Job controller would make, and the scheduler would place."""
    template = copy.deepcopy(job["spec"]["template"])
    meta = template["metadata"]
    meta |= {"name": "gpt-a1-0", "namespace": TEAM}
    meta["labels"]["batch.kubernetes.io/job-completion-index"] = "0"
    meta["annotations"] = {"batch.kubernetes.io/job-completion-index": "0"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    meta["ownerReferences"] = [{**owner, "controller": True}]
    spec = {key: value for key, value in template["spec"].items() if not key.startswith("serviceAccount")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {**spec, "nodeName": "gpu-1"}}


def _phases(api: Api) -> list[str]:
    items = api.kubectl.get("etj", "-n", TEAM).get("items", [])
    return [str(item.get("status", {}).get("phase", "")) for item in items]


def _revisions(api: Api) -> list[int]:
    own = ("-l", "elastictraining.dev/job-name=gpt")
    items = api.kubectl.get("controllerrevisions", "-n", TEAM, *own).get("items", [])
    return sorted(item["revision"] for item in items)


CASES = {
    "all-namespaces": ({}, {TEAM: (JOBS,), "": (JOBS, CLUSTER), NODE_LEASES: (JOBS,), HOME: (LEADER,)}),
    "one-namespace": (
        {"watchNamespaces": [TEAM]},
        {TEAM: (JOBS,), "": (CLUSTER, SERVED), NODE_LEASES: (NODES,), HOME: (LEADER,)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_whole_life_asks_for_every_right_of_the_table_and_for_no_other(api: Api, case: str, tmp_path: Path) -> None:
    values, tables = CASES[case]
    api.install(**values)
    live(api, tmp_path, TEAM if values else None)
    found = api.asked()
    refused = {key: codes for key, codes in found.items() if codes & {401, 403}}
    assert refused == {}
    wanted = {(namespace, right) for namespace, some in tables.items() for right in asked(*some)}
    allowed = {(namespace, right) for namespace, some in tables.items() for right in rights(*some)}
    assert {key for key in found if key not in allowed} == set()
    told = {right for _, right in found}
    assert {right for _, right in wanted} - told == set()


@pytest.mark.parametrize("case", CASES)
def test_nothing_outside_of_the_table_is_allowed(api: Api, case: str, tmp_path: Path) -> None:
    values, _ = CASES[case]
    api.install(**values)
    everywhere = rights(CLUSTER, SERVED if values else JOBS)
    places = {
        "": everywhere,
        TEAM: everywhere | rights(JOBS),
        "kube-system": everywhere,
        NODE_LEASES: everywhere | rights(NODES),
        HOME: everywhere | {Right("coordination.k8s.io", "leases", "create")},
    }
    server = Server(api.as_operator(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        resources = _resources(server)
        assert ("", "secrets") in resources and ("", "pods/exec") in resources
        questions = [
            (namespace, Right(group, resource, verb))
            for namespace in places
            for (group, resource), is_namespaced in resources.items()
            for verb in VERBS
            if is_namespaced or not namespace
        ]
        answers = list(pool.map(lambda question: _may(server, *question), questions))
    allowed = {question for question, answer in zip(questions, answers, strict=True) if answer}
    expected = {(namespace, right) for namespace, right in questions if right in places[namespace]}
    assert allowed == expected


def test_the_leader_may_change_the_one_lease_of_its_name_only(api: Api, tmp_path: Path) -> None:
    api.install(watchNamespaces=[TEAM])
    server = Server(api.as_operator(tmp_path))
    for verb in ("get", "update", "delete"):
        right = Right("coordination.k8s.io", "leases", verb)
        assert _may(server, HOME, right, releases.NAME)
        assert not _may(server, HOME, right, "other")
        assert not _may(server, "kube-system", right, "kube-scheduler")


@pytest.mark.parametrize(
    ("missing", "kind"),
    [
        (Right("elastictraining.dev", "elastictrainingjobs/finalizers", "update"), "Job"),
        (Right("coordination.k8s.io", "leases", "get"), "Role"),
        (Right("coordination.k8s.io", "leases", "patch"), "Role"),
    ],
)
def test_what_nobody_asks_for_is_demanded_by_the_api_server(api: Api, missing: Right, kind: str) -> None:
    api.install()
    try:
        api.kubectl.apply(training_job(suspend=True))
        (manifest,) = [item for item in manifests(api.job()["metadata"]["uid"]) if item["kind"] == kind]
        create_as_operator(api, manifest)
        api.kubectl("delete", kind, manifest["metadata"]["name"], "-n", TEAM)
        role = copy.deepcopy(next(item for item in api.objects if item["kind"] == "ClusterRole"))
        for rule in role["rules"]:
            if missing.group in rule["apiGroups"] and missing.resource in rule["resources"]:
                rule["verbs"] = [verb for verb in rule["verbs"] if verb != missing.verb]
        role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]
        api.values = None  # to be installed again
        api.kubectl("replace", "-f", "-", stdin=yaml.safe_dump(role))
        said = api.wait("the right to be missed", lambda: refusal(api, manifest, dry_run=True))
        assert (
            "cannot set blockOwnerDeletion" in said or "attempting to grant RBAC permissions not currently held" in said
        )
    finally:
        api.kubectl("delete", "etj", "gpt", "-n", TEAM, "--ignore-not-found")


def manifests(uid: str, namespace: str = TEAM) -> list[dict[str, Any]]:
    """Return the objects of an attempt, as the operator makes them."""
    job = JobRef(name="gpt", namespace=namespace, uid=uid)
    current = Current(topology=Topology(dp=2), num_nodes=1, gpus_per_node=2)
    return attempt_objects(job, parse_spec(SPEC), 7, current, 5)


def create_as_operator(api: Api, manifest: dict[str, Any], *options: str) -> str:
    return api.kubectl("create", "--as", ACCOUNT, *options, "-f", "-", stdin=yaml.safe_dump(manifest))


def refusal(api: Api, manifest: dict[str, Any], *, dry_run: bool = False) -> str:
    """Return what the API server says to the operator's account; empty where it takes the object."""
    try:
        create_as_operator(api, manifest, *(["--dry-run=server"] if dry_run else []))
    except TestbedError as error:
        return str(error)
    return ""


@pytest.fixture
def bounded(api: Api) -> Iterator[Api]:
    """The policy at work, and a job that owns things."""
    api.install()
    api.kubectl.apply(training_job(suspend=True))
    probe = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "probe", "namespace": TEAM}}
    api.wait("the policy", lambda: "may change only what belongs" in refusal(api, probe, dry_run=True))
    yield api
    api.clear()


def test_the_policy_lets_only_jobs_be_deleted_that_have_ended_and_ask_for_it(bounded: Api) -> None:
    with pytest.raises(TestbedError, match="only one that has ended"):
        bounded.kubectl("delete", "etj", "gpt", "-n", TEAM, "--as", ACCOUNT, "--wait=false")
    assert "deletionTimestamp" not in bounded.job()["metadata"]


def test_the_policy_takes_everything_that_an_attempt_consists_of(bounded: Api) -> None:
    made = manifests(bounded.job()["metadata"]["uid"])
    for manifest in made:
        create_as_operator(bounded, manifest)
    for manifest in made:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        bounded.kubectl("delete", kind, name, "-n", TEAM, "--as", ACCOUNT, "--wait=false")


FOREIGN = [
    ("lease", "kube-scheduler", "kube-system", {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}),
    ("lease", "others", TEAM, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}),
    ("lease", "others", HOME, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}),
    (
        "controllerrevision", "others", TEAM,
        {"apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1, "data": {}},
    ),
    ("serviceaccount", "others", TEAM, {"apiVersion": "v1", "kind": "ServiceAccount"}),
    ("service", "others", TEAM, {"apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": "None"}}),
    ("role", "others", TEAM, {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "rules": []}),
    (
        "poddisruptionbudget", "others", TEAM,
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"minAvailable": 1}},
    ),
    (
        "pod", "others", TEAM,
        {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "a", "image": "a"}]}},
    ),
    (
        "job", "others", TEAM,
        {
            "apiVersion": "batch/v1", "kind": "Job",
            "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "a", "image": "a"}]}}},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "namespace", "body"), FOREIGN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_policy_refuses_what_belongs_to_nobodys_job(
    bounded: Api, kind: str, name: str, namespace: str, body: dict[str, Any]
) -> None:
    labels = {"elastictraining.dev/job-name": "gpt", "elastictraining.dev/attempt": "7"}
    manifest = {**body, "metadata": {"name": name, "namespace": namespace, "labels": labels}}
    if kind != "pod":
        assert "may change only what belongs to an ElasticTrainingJob" in refusal(bounded, manifest)
    bounded.kubectl("create", "-f", "-", stdin=yaml.safe_dump(manifest))
    try:
        with pytest.raises(TestbedError, match="the operator's account may change only what belongs"):
            bounded.kubectl("delete", kind, name, "-n", namespace, "--as", ACCOUNT, "--wait=false")
        if kind == "lease":
            with pytest.raises(TestbedError, match="the operator's account may change only what belongs"):
                bounded.kubectl("annotate", kind, name, "-n", namespace, "--as", ACCOUNT, "a=b")
    finally:
        bounded.kubectl("delete", kind, name, "-n", namespace, "--grace-period=0", "--force")


def _owned(uid: str, kind: str, **changes: Any) -> dict[str, Any]:
    (found,) = [item for item in manifests(uid) if item["kind"] == kind]
    return {**found, **changes}


def test_the_policy_refuses_rights_beyond_one_lease_jobs_in_protected_namespaces_and_forged_events(
    bounded: Api,
) -> None:
    uid = bounded.job()["metadata"]["uid"]
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]}
    pods = {"resources": ["pods"], "apiGroups": [""], "verbs": ["list"]}  # which the operator may do itself
    for rules in ([rule], [{**rule, "resourceNames": ["other"]}], [{**rule, **pods}]):
        assert "may name the Lease of its attempt only" in refusal(bounded, _owned(uid, "Role", rules=rules))
    create_as_operator(bounded, _owned(uid, "Role"))
    for selector in ({}, {"matchLabels": {"elastictraining.dev/job-name": "other"}}, {"matchLabels": {"app": "web"}}):
        budget = _owned(uid, "PodDisruptionBudget", spec={"minAvailable": 3, "selector": selector})
        assert "may cover only the pods of its job" in refusal(bounded, budget)
    account = {"kind": "ServiceAccount", "name": "default", "namespace": "kube-system"}
    said = "may bind only the Role of its attempt"
    assert said in refusal(bounded, _owned(uid, "RoleBinding", subjects=[account]))
    wide = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpt-a7"}
    bounded.kubectl("create", "clusterrole", "gpt-a7", "--verb=get", "--resource=leases", check=False)
    assert said in refusal(bounded, _owned(uid, "RoleBinding", roleRef=wide))
    bounded.kubectl("delete", "clusterrole", "gpt-a7")
    for namespace in ("kube-system", NODE_LEASES, HOME):
        (job,) = [item for item in manifests(uid, namespace) if item["kind"] == "Job"]
        assert "may change nothing in this namespace" in refusal(bounded, job)
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "e", "namespace": TEAM}, "reason": "r",
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": TEAM, "apiVersion": "v1"},
    }  # fmt: skip
    assert "may change only what belongs" in refusal(bounded, event)
    bounded.kubectl("create", "-f", "-", stdin=yaml.safe_dump(event))
    with pytest.raises(TestbedError, match="may change only what belongs"):
        bounded.kubectl("annotate", "event", "e", "-n", TEAM, "--as", ACCOUNT, "a=b")


def test_where_the_namespace_is_shared_the_policy_refuses_the_operators_account_to_jobs(api: Api) -> None:
    api.install(allowJobsInReleaseNamespace=True)
    api.kubectl.apply(training_job(HOME, suspend=True))
    try:
        uid = api.job(HOME)["metadata"]["uid"]
        (job,) = [item for item in manifests(uid, HOME) if item["kind"] == "Job"]
        api.wait("the policy", lambda: not refusal(api, job, dry_run=True))
        job["spec"]["template"]["spec"]["serviceAccountName"] = releases.NAME
        said = api.wait("the policy", lambda: refusal(api, job, dry_run=True))
        assert "no pod that the operator makes may run under the operator's account" in said
    finally:
        api.kubectl("delete", "etj", "gpt", "-n", HOME)


def test_a_job_in_the_operators_namespace_is_told_and_gets_nothing(api: Api, tmp_path: Path) -> None:
    api.install()
    process = Operator(api.as_operator(tmp_path), None, tmp_path / "operator.log", "--lease-namespace", HOME)
    try:
        api.kubectl.apply(training_job(HOME))
        condition = api.wait("the refusal", lambda: spec_valid(api))
        assert (condition["status"], condition["reason"]) == ("False", "NotPermitted")
        assert f"{HOME} is the operator's own namespace" in condition["message"]
        time.sleep(2)
        assert not api.kubectl.get("jobs", "-n", HOME).get("items")
        events = api.kubectl.get("events", "-n", HOME)["items"]
        assert [item["reason"] for item in events] == ["NotPermitted"]
    finally:
        process.stop()
        print((tmp_path / "operator.log").read_text())
        api.kubectl("delete", "etj", "gpt", "-n", HOME, "--ignore-not-found")


def spec_valid(api: Api) -> dict[str, Any]:
    conditions = api.job(HOME).get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == "SpecValid"), {})


def _resources(server: Server) -> dict[tuple[str, str], bool]:
    """Return all resources and subresources that the API server has, and whether they are in namespaces."""
    found: dict[tuple[str, str], bool] = {}
    groups = server.ask("GET", "/apis")["groups"]
    paths = {"": "/api/v1"} | {item["name"]: f"/apis/{item['preferredVersion']['groupVersion']}" for item in groups}
    for group, path in paths.items():
        for item in server.ask("GET", path)["resources"]:
            if item["name"] not in OF_EVERY_ACCOUNT:
                found[group, item["name"]] = item["namespaced"]
    return found


def _may(server: Server, namespace: str, right: Right, name: str = "") -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "namespace": namespace, "verb": right.verb, "group": right.group, "resource": resource,
        "subresource": subresource, "name": name,
    }  # fmt: skip
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = server.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


class Server:
    """Requests to the API server with the credentials of a kubeconfig, from several threads."""

    def __init__(self, config: Path) -> None:
        value = yaml.safe_load(config.read_text())
        cluster, user = value["clusters"][0]["cluster"], value["users"][0]["user"]
        data = cluster.get("certificate-authority-data")
        context = ssl.create_default_context(
            cadata=base64.b64decode(data).decode() if data else None, cafile=cluster.get("certificate-authority")
        )
        self._address = cluster["server"]
        self._pool = urllib3.PoolManager(
            maxsize=8, ssl_context=context, headers={"Authorization": f"Bearer {user['token']}"}
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._pool.request(method, self._address + path, json=body)
        assert answer.status in (200, 201), answer.data
        return answer.json()
