"""State of the modelled cluster: objects of the API server, processes on nodes, commits on storage, and faults."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

from elastic_operator.api.serialization import format_time
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.manifests.workload import QUEUE_LABEL
from elastic_operator.observed.observation import attempt_of, controller_of
from elastic_operator.observed.placement.pod_resources import pod_requests
from reshard.contract import KIND, Env, Label

GPU = "amd.com/gpu"
NODES = ("n1", "n2", "n3")
GPUS_PER_NODE = 2
STEPS = 30
EXTERNAL_STEP = 10
START = 1_800_000_000.0
UID = "uid-of-the-job"
PREDECESSOR = "uid-of-its-predecessor"
SIDECAR = "proxy"
INDEX = "batch.kubernetes.io/job-completion-index"

SPEC: dict[str, Any] = {
    "accelerator": {"resource": GPU, "perNode": [GPUS_PER_NODE]},
    "nodes": {"min": 1, "max": 3},
    "parallelism": {"tensor": [1, 2], "pipeline": [1, 2, 3]},
    "batch": {"globalSamples": 20, "microSamples": 2},
    "checkpoint": {"claimName": "ckpt", "path": "gpt", "intervalSeconds": 5},
    "recovery": {
        "scaleUpStableSeconds": 20,
        "drainSeconds": 30,
        "restartBudget": {"limit": 1000, "windowSeconds": 3600},
    },
    "reshard": {"backoffLimit": 100},
    "template": {"spec": {"containers": [{"name": "train", "image": "image"}]}},
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Process:
    """The container of a pod on its node. It may go on after the API server has deleted its pod.

    Attributes:
        uid: of the pod.
        job: name of the Job, which is also that of the attempt's Lease.
        env: environment of a training process.
        lease_uid: UID of the Lease that answered first; empty before.
        refused_since: since when the API server refuses the Lease; None if it does not.
        report: annotations that rank 0 wants on its Lease.
        request: the operator's request, as rank 0 has last read it.
        released: released commits, as rank 0 has last read them.
        step: number of finished steps; None until the training has been restored.
        is_saving: a save is due, and storage has not taken it yet.
        unpublished: the newest save that is not published, empty for none.
        published_step: step of the newest commit that this process has published.
        may_publish_late: the Lease has answered and the node was cut off before the rename: one save may follow late.
    """

    uid: str
    pod: str
    node: str
    job: str
    job_uid: str
    role: str
    attempt: int
    index: int
    env: dict[str, str]
    start_time: float
    lease_uid: str = ""
    refused_since: float | None = None
    report: dict[str, str] = dataclasses.field(default_factory=dict)
    request: str = ""
    released: tuple[str, ...] = ()
    step: int | None = None
    is_saving: bool = False
    unpublished: str = ""
    published_step: int = -1
    may_publish_late: bool = False

    @property
    def owner(self) -> str:
        """UID of the ElasticTrainingJob."""
        return self.env.get(Env.JOB_UID, "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A published checkpoint on storage."""

    step: int
    attempt: int
    topology: dict[str, int]
    owner: str = UID
    format: str = "deepspeed"
    is_copy_of_start: bool = False


class Cluster:
    """State that the participants share; only `World` and the modules of the participants change it.

    Attributes:
        now: time by the API server's clock, which the operator shares.
        version: grows with each change that a watch would deliver.
        skews: how far the clock of each node is ahead.
        killed: nodes without power, and since when.
        lost_since: since when the kubelet of a node has not reached the API server.
        silent: nodes whose Ready condition nobody updates.
        unsynced: nodes that are back, and whose kubelet has not compared its processes with the API server yet.
        cuts: pairs that cannot communicate: who, and the node where they are; empty for the operator.
        stuck: UIDs of pods whose processes cannot be killed.
        exits: exit code and message of ended processes that their kubelet has not reported, by UID of the pod.
        pending_ends: the same of processes that wait for their device and so cannot exit yet.
        taken: commit of a predecessor that the job goes on from, empty for none; None as long as it has not looked.
        root_owner: UID of the job that owns the checkpoint folder, empty for none.
        newest_started: newest attempt of the job that has left its marker on storage.
        quota: number of nodes that Kueue may give; None without Kueue.
        launched: number of each attempt that was launched, in order.
        sidecar: where admission puts a container that never ends: `before` ours, `after` it, or empty for none.
        sidecars: nodes on which these containers run, by UID of their pod.
        left_behind: UIDs of pods on lost nodes, beside which a later attempt was launched.
        commit_bytes: size of each commit that the training reports; 0 if it is not known.
        made_steps: number of steps that the job has reported, also those that a later attempt made again.
        refusal: what is refused of every commit of the job, by whom: `convert` (a reshard pod ends with exit code 11),
            `read` (with 10, and one message), `load` (rank 0, with one message); empty for nothing.
        refused: commits that were refused with exit code 10 or by rank 0.
        acknowledged: commits of the training that a status has named.
        passed_over: those that were acknowledged when the user last set `spec.checkpoint.resumeFrom`.
        begun_over: those that were acknowledged when the user last set it to Beginning.
        effects: how often something rare has happened, to show that traces reach it.
    """

    def __init__(self) -> None:
        self.now = START
        self.version = 0
        self.serial = 0
        self.spec: dict[str, Any] = copy.deepcopy(SPEC)
        self.generation = 1
        self.steps = STEPS
        self.status: dict[str, Any] = {}
        self.skews = dict.fromkeys(NODES, 0.0)
        self.killed: dict[str, float] = {}
        self.lost_since: dict[str, float] = {}
        self.silent: set[str] = set()
        self.unsynced: set[str] = set()
        self.cuts: set[tuple[str, str]] = set()
        self.is_api_up = True
        self.stuck: set[str] = set()
        self.blocked: set[str] = set()
        self.has_room = self.has_image = True
        self.nodes = {name: self._node(name) for name in NODES}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, Process] = {}
        self.exits: dict[str, tuple[int, str]] = {}
        self.pending_ends: dict[str, tuple[int, str]] = {}
        self.commits: dict[str, Commit] = {}
        self.damaged: set[str] = set()
        self.refusal = ""
        self.refused: set[str] = set()
        self.acknowledged: set[str] = set()
        self.passed_over: set[str] = set()
        self.begun_over: set[str] = set()
        self.external = ""
        self.root_owner = ""
        self.taken: str | None = None
        self.newest_started = 0
        self.quota: int | None = None
        self.launched: list[int] = []
        self.sidecar = ""
        self.sidecars: dict[str, str] = {}
        self.left_behind: set[str] = set()
        self.effects: collections.Counter[str] = collections.Counter()
        self.made_steps = 0
        self.commit_bytes = 0

    def _node(self, name: str) -> dict[str, Any]:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": format_time(self.now - 1000)}
        devices = {GPU: str(GPUS_PER_NODE)}
        return {
            "metadata": {"name": name},
            "spec": {},
            "status": {"conditions": [ready], "allocatable": dict(devices), "capacity": dict(devices)},
        }

    @property
    def job(self) -> JobRef:
        """The resource."""
        labels = {} if self.quota is None else {QUEUE_LABEL: "queue"}
        return JobRef(name="gpt", namespace="ns", uid=UID, generation=self.generation, created_at=START, labels=labels)

    def touch(self) -> None:
        """Note a change that a watch delivers to the operator."""
        self.version += 1

    def reaches_api(self, who: str, node: str = "") -> bool:
        """Return whether `kubelet` or `trainer` of a node, or the `operator`, reaches the API server."""
        return self.is_api_up and (who, node) not in self.cuts

    def reaches_storage(self, node: str) -> bool:
        """Return whether the processes of a node reach the checkpoint volume."""
        return ("storage", node) not in self.cuts

    def is_fenced_off(self, node: str) -> bool:
        """Return whether nobody can expect that processes on a node have ended: only the Lease keeps them apart."""
        return (
            node in self.killed
            or node in self.unsynced
            or ("kubelet", node) in self.cuts
            or self.ready(node)["status"] != "True"
        )

    def ready(self, node: str) -> dict[str, Any]:
        """Return the Ready condition of a node."""
        (condition,) = self.nodes[node]["status"]["conditions"]
        return dict(condition)

    def set_ready(self, node: str, value: str) -> None:
        """Set the Ready condition of a node."""
        (condition,) = self.nodes[node]["status"]["conditions"]
        if condition["status"] != value:
            condition |= {"status": value, "lastTransitionTime": format_time(self.now)}
            self.touch()

    def jobs(self) -> list[dict[str, Any]]:
        """Return all batch/v1 Jobs."""
        return [item for (kind, _), item in self.objects.items() if kind == "Job"]

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Store a new object."""
        item: dict[str, Any] = copy.deepcopy(dict(manifest))
        self.serial += 1
        item["metadata"] |= {
            "uid": f"uid-{self.serial}",
            "creationTimestamp": format_time(self.now),
            "resourceVersion": str(self.serial),
        }
        item["status"] = {}
        self.objects[item["kind"], item["metadata"]["name"]] = item
        self.touch()
        return item

    def make_pod(self, job: dict[str, Any], index: int) -> dict[str, Any]:
        """Store a new pod of a Job."""
        self.serial += 1
        template, owner = copy.deepcopy(job["spec"]["template"]), job["metadata"]
        name = f"{owner['name']}-{index}-{self.serial}"
        if self.sidecar:
            template["spec"]["containers"].insert(0 if self.sidecar == "before" else 1, {"name": SIDECAR, "image": "i"})
        self.pods[name] = {
            "metadata": {
                "namespace": "ns",
                "name": name,
                "uid": f"uid-{self.serial}",
                "labels": {**template["metadata"]["labels"], INDEX: str(index)},
                "annotations": template["metadata"].get("annotations") or {},
                "creationTimestamp": format_time(self.now),
                "ownerReferences": [{"kind": "Job", "name": owner["name"], "uid": owner["uid"], "controller": True}],
                "ownerJob": owner["name"],
                "ownerUid": owner["uid"],
                "gpus": pod_requests(template["spec"]).get(GPU, 0),
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        self.touch()
        return self.pods[name]

    def delete_pod(self, pod: dict[str, Any], grace: float = 0.0) -> None:
        """Delete a pod with a grace period; a second deletion may only shorten it."""
        meta, end = pod["metadata"], format_time(self.now + grace)
        known = meta.get("deletionTimestamp")
        if known is not None and known <= end:
            return
        meta |= {"deletionTimestamp": end, "deletionGracePeriodSeconds": int(grace), "graceful": grace > 0}
        self.touch()

    def start(self, pod: dict[str, Any]) -> None:
        """Start the process of a pod on its node."""
        meta = pod["metadata"]
        env = {item["name"]: item.get("value", "") for item in container_of(pod).get("env", ())}
        self.processes[meta["uid"]] = Process(
            uid=meta["uid"],
            pod=meta["name"],
            node=pod["spec"]["nodeName"],
            job=meta["ownerJob"],
            job_uid=meta["ownerUid"],
            role=role_of(pod),
            attempt=attempt_of(meta),
            index=int(meta["labels"][INDEX]),
            env=env,
            start_time=self.now,
        )
        pod["status"] = {**pod["status"], "phase": "Running"}
        if self.sidecar:
            self.sidecars[meta["uid"]] = pod["spec"]["nodeName"]
        self.touch()

    def end(self, process: Process, code: int, message: str = "") -> None:
        """End a process; its kubelet reports the exit code when it can. One that is stuck ends when it is released."""
        if process.uid in self.stuck:
            self.pending_ends.setdefault(process.uid, (code, message))
        elif self.processes.pop(process.uid, None) is not None:
            self.exits[process.uid] = (code, message)

    def terminate(self, pod: dict[str, Any], code: int, message: str = "", reason: str = "") -> None:
        """Show in a pod that its container has ended, and the pod with it unless it has a sidecar that runs."""
        state = {"terminated": {"exitCode": int(code), "message": message, "reason": reason}}
        conditions = pod["status"].get("conditions")
        phase = "Succeeded" if code == 0 else "Failed"
        statuses = [{"name": container_of(pod)["name"], "state": state}]
        if pod["metadata"]["uid"] in self.sidecars:
            statuses.insert(0, {"name": SIDECAR, "state": {"running": {}}})
            phase = "Running"
            self.effects["a sidecar outlives its pod's container"] += 1
        pod["status"] = {"phase": phase, "containerStatuses": statuses}
        if conditions:
            pod["status"]["conditions"] = conditions
        self.touch()

    def own_workers(self) -> list[tuple[dict[str, Any], Process]]:
        """Return the training pods of the job, not of its predecessor, that have a process."""
        running = ((pod, self.processes.get(pod["metadata"]["uid"])) for pod in self.pods.values())
        return [
            (pod, process)
            for pod, process in running
            if process is not None and process.role == "worker" and process.owner == UID
        ]


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the container of a pod, or of a pod template, that admission has not added."""
    (container,) = (item for item in pod["spec"]["containers"] if item["name"] != SIDECAR)
    return dict(container)


def role_of(item: dict[str, Any]) -> str:
    """Return whether a Job or pod trains or converts."""
    return str(item["metadata"]["labels"][Label.ROLE])


def owner_of(item: dict[str, Any]) -> str:
    """Return the UID of the ElasticTrainingJob that controls an object."""
    return str(controller_of(item["metadata"], KIND).get("uid", ""))
