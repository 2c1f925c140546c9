"""The whole model: time passes, the operator acts, and things happen to the cluster."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from elastic_operator.api.status import Status
from reshard.contract import GROUP, KIND, Env, Label
from tests.property.cluster_model import control_plane, invariants, kubelets, kueue, trainings
from tests.property.cluster_model.cluster import (
    EXTERNAL_STEP,
    GPU,
    NODES,
    PREDECESSOR,
    START,
    STEPS,
    UID,
    Cluster,
    Commit,
    owner_of,
)
from tests.property.cluster_model.operator_process import CrashError, OperatorProcess, read_stored

STRIDE_SECONDS = 5.0
"""Longest time in one step of the model; the operator polls at least that often."""
IDLE_SECONDS = 5.0
CONVERSION_WAIT_SECONDS = 40
DCP_SHAPES: dict[str, Any] = {
    "parallelism": {"strategy": "Ranked", "topologies": [{"data": 6}, {"pipeline": 4}, {"pipeline": 2}]},
    "batch": {"globalSamples": 24, "microSamples": 2},
}
"""A large commit of one or two nodes, whose tensors are whole, is worth a conversion before six ranks load it."""
LAST_STEPS = 15
"""Number of steps that a long training makes after everything has been put right."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a job is like and what it finds.

    Attributes:
        external: folder of a checkpoint of others from which the job starts, empty for none.
        max_nodes: largest number of nodes that the job uses.
        steps: number of steps of the whole training.
        budget: limit of its restart budget.
        retries: number of retries of a conversion.
        on_failure: what follows when they are used up.
        deadline: activeDeadlineSeconds; None for none.
        quota: number of nodes that Kueue may give; None for a job that is in no queue.
        fatal_code: exit code that fails the job by its podFailurePolicy; None for no policy.
        predecessor: folder of an earlier job of the same name that still runs, empty for none.
        take_over: spec.checkpoint.takeOver.
        format: format of its checkpoints.
        mode: spec.reshard.mode.
        num_bytes: size of each of its commits; 0 if it is not known.
        sidecar: where admission puts a container that never ends, `before` or `after` ours; empty for none.
    """

    external: str = ""
    max_nodes: int = 3
    steps: int = STEPS
    budget: int = 1000
    retries: int = 100
    on_failure: str = "RetainTopology"
    deadline: int | None = None
    quota: int | None = None
    fatal_code: int | None = None
    predecessor: str = ""
    take_over: str = "Never"
    format: str = "DeepSpeed"
    mode: str = "Auto"
    num_bytes: int = 0
    sidecar: str = ""


class World(Cluster):
    """A cluster with one job, its operator, and everything that may happen to it.

    Args:
        external: folder of an external checkpoint that the job starts from, empty for none.
        setup: what else the job is like.
    """

    def __init__(self, external: str = "", setup: Setup | None = None) -> None:
        super().__init__()
        setup = setup or Setup(external=external)
        self.steps = setup.steps
        self.spec["nodes"]["max"] = setup.max_nodes
        self.spec["checkpoint"] |= {"startFrom": setup.external, "takeOver": setup.take_over, "format": setup.format}
        self.commit_bytes = setup.num_bytes
        self.sidecar = setup.sidecar
        if setup.format == "DCP":
            self.spec |= copy.deepcopy(DCP_SHAPES)
        self.spec["recovery"]["restartBudget"]["limit"] = setup.budget
        self.spec["reshard"] |= {
            "mode": setup.mode,
            "backoffLimit": setup.retries,
            "onFailure": setup.on_failure,
        }
        if setup.deadline is not None:
            self.spec["activeDeadlineSeconds"] = setup.deadline
        if setup.fatal_code is not None:
            codes = {"operator": "In", "values": [setup.fatal_code]}
            self.spec["recovery"]["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
        self.quota = self.full_quota = setup.quota
        if setup.external:
            self.external = f"/checkpoint/{setup.external}"
            self.commits[self.external] = Commit(step=EXTERNAL_STEP, attempt=0, topology={}, owner="others")
        if setup.predecessor:
            self._leave_predecessor(f"/checkpoint/{setup.predecessor}")
        self._stored = Status()
        self._operator = OperatorProcess(self, self._check_launch)

    def _leave_predecessor(self, root: str) -> None:
        """Add an earlier resource of the same name that was deleted: its Job, Lease and running pod are still there."""
        owner = {"apiVersion": f"{GROUP}/v1", "kind": KIND, "name": "gpt", "uid": PREDECESSOR, "controller": True}
        env = {
            Env.JOB_UID: PREDECESSOR,
            Env.CHECKPOINT_ROOT: root,
            Env.TOPOLOGY: '{"tp": 2}',
            Env.RESUME: "",
            "PET_NNODES": "1",
        }
        container = {
            "name": "train",
            "env": [{"name": str(key), "value": value} for key, value in env.items()],
            "resources": {"limits": {GPU: "2"}},
        }
        labels = {str(Label.JOB): "gpt", str(Label.ATTEMPT): "1", str(Label.ROLE): "worker"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        meta = {"namespace": "ns", "name": "gpt-a1", "labels": labels, "ownerReferences": [owner]}
        self.now = START - 100
        self.create({"kind": "Lease", "metadata": meta, "spec": {}})
        job = self.create({"kind": "Job", "metadata": meta, "spec": {"template": template}})
        pod = self.make_pod(job, 0)
        pod["spec"]["nodeName"] = NODES[0]
        self.start(pod)
        self.root_owner = PREDECESSOR if root == "/checkpoint/gpt" else ""
        self.now = START

    def _check_launch(self, job: dict[str, Any]) -> None:
        invariants.check_launch(self, job)

    # -- time and the operator --------------------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        """Let the rest of the world act once after some time; a longer time passes in several steps."""
        while seconds > 0:
            stride = min(seconds, STRIDE_SECONDS)
            seconds -= stride
            self.now += stride
            self._operator.poll()
            control_plane.run(self)
            kueue.run(self)
            kubelets.run(self)
            trainings.run(self)
            invariants.check_world(self)

    def operate(self, crash_after: int | None = None) -> None:
        """Run one pass of the operator; it may die after any of its writes."""
        if not self.reaches_api("operator"):
            return
        before, wire, phase = self._stored, self.status, self.phase
        launched = max(self.launched, default=0)
        try:
            self._stored = self._operator.run_pass(before, crash_after)
        except CrashError:
            self.effects["the operator dies"] += 1
            self._operator = OperatorProcess(self, self._check_launch)
        if self.status is not wire:
            self._stored = read_stored(self.status)
            invariants.check_status(self.status, is_thorough=self.phase != phase)
            invariants.check_progress(self, before, self._stored, launched)
        invariants.check_world(self)

    def proceed(self, seconds: float = 1.0) -> None:
        """Let time pass; the operator looks whenever it is woken or its time to look again has come."""
        end = self.now + seconds
        while self.now < end:
            is_idle = not self.processes and not self._operator.is_due
            self.tick(IDLE_SECONDS if is_idle else 1.0)
            if self._operator.is_due:
                self.operate()

    def repair(self) -> None:
        """Put everything right again, and let the training end soon."""
        for name in NODES:
            self.heal(name)
            self.plugin(name, 2)
            self.cordon(name, False)
            self.taint(name, "")
            self.storage(name, True)
            self.block(name, False)
        self.connect_operator(True)
        self.release()
        self.room(True)
        self.image(True)
        self.refuse("")
        self.collect()
        if self.quota is not None:
            self.quota = self.full_quota
        if self.spec.get("suspend"):
            self.suspend(False)
        if self.steps > STEPS:
            done = max((item.step for item in self.commits.values()), default=0)
            self.steps = min(self.steps, done + LAST_STEPS)

    # -- what happens -----------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """A node loses its power."""
        if name in self.killed:
            return
        self.killed[name] = self.now
        for process in [item for item in self.processes.values() if item.node == name]:
            del self.processes[process.uid]
        self.sidecars = {uid: node for uid, node in self.sidecars.items() if node != name}

    def silence(self, name: str) -> None:
        """The node is lost, and only its Lease shows it: nobody sets its Ready condition."""
        if name not in self.killed:
            self.kill(name)
            self.silent.add(name)

    def isolate(self, name: str) -> None:
        """The network of a node fails, except for storage: its processes go on, and nobody knows it."""
        self.cut("kubelet", name)
        self.cut("trainer", name)

    def isolate_attempt(self, seconds: float = 0.0) -> None:
        """The network of every node on which the job trains fails for some time: the whole attempt goes on unseen."""
        for name in sorted({process.node for _, process in self.own_workers()}):
            self.isolate(name)
        self.proceed(seconds)

    def cut(self, who: str, name: str) -> None:
        """The kubelet or the trainings of a node lose the API server; a trainer may just have had its answer."""
        if (who, name) in self.cuts:
            return
        self.cuts.add((who, name))
        for process in self.processes.values():
            if who == "trainer" and process.node == name and process.refused_since is None:
                process.may_publish_late = process.step is not None and bool(process.lease_uid)

    def heal(self, name: str) -> None:
        """A node gets its power and its network back."""
        if self.killed.pop(name, None) is not None or ("kubelet", name) in self.cuts:
            self.unsynced.add(name)
        self.cuts -= {("kubelet", name), ("trainer", name)}
        self.silent.discard(name)

    def storage(self, name: str, is_reachable: bool) -> None:
        """The processes of a node lose the checkpoint volume, or find it again."""
        if is_reachable:
            self.cuts.discard(("storage", name))
        else:
            self.cuts.add(("storage", name))

    def connect_operator(self, is_connected: bool) -> None:
        """The operator loses the API server, or finds it again."""
        if is_connected:
            self.cuts.discard(("operator", ""))
        else:
            self.cuts.add(("operator", ""))

    def outage(self, seconds: float) -> None:
        """The API server is away for some time: nobody can write, and the trainings go on."""
        self.is_api_up = False
        self.tick(seconds)
        self.is_api_up = True

    def skew(self, name: str, seconds: float) -> None:
        """The clock of a node, and so of its kubelet and its trainings, is set."""
        self.skews[name] = seconds

    def plugin(self, name: str, count: int) -> None:
        """The device plugin of a node offers so many devices."""
        allocatable = self.nodes[name]["status"]["allocatable"]
        if allocatable[GPU] != str(count):
            allocatable[GPU] = str(count)
            self.touch()

    def cordon(self, name: str, value: bool) -> None:
        """An administrator cordons a node, or undoes it."""
        self.nodes[name]["spec"]["unschedulable"] = value
        self.touch()

    def taint(self, name: str, effect: str) -> None:
        """Somebody taints a node; an empty effect removes the taint."""
        taints = [{"key": "vendor.example/maintenance", "effect": effect}] if effect else []
        self.nodes[name]["spec"]["taints"] = taints
        self.touch()

    def _running(self) -> list[dict[str, Any]]:
        """Return the training pods of the job whose kubelet answers."""
        return [pod for pod, process in self.own_workers() if ("kubelet", process.node) not in self.cuts]

    def runs(self, pod: dict[str, Any]) -> bool:
        """Return whether a pod has a process."""
        return pod["metadata"]["uid"] in self.processes

    def fail_pod(self, which: int, code: int = 1) -> None:
        """A process of the job crashes, in a training or a conversion."""
        processes = [item for item in self.processes.values() if item.owner in (UID, "")]
        if processes:
            self.end(processes[which % len(processes)], code)

    def fail_conversion(self, name: str, code: int = 1) -> None:
        """A node loses its power, and the conversion that follows crashes, if there is one."""
        self.kill(name)
        for _ in range(CONVERSION_WAIT_SECONDS):
            self.proceed()
            process = next((item for item in self.processes.values() if item.role == "reshard"), None)
            if process is not None:
                self.effects["a conversion fails"] += 1
                self.end(process, code)
                return

    def preempt(self, which: int, grace: float) -> None:
        """A pod of higher priority takes the place of a pod, which runs on until its grace period ends."""
        running = self._running()
        if running:
            control_plane.disrupt(self, running[which % len(running)], "PreemptionByScheduler", grace)

    def stick(self, which: int) -> None:
        """A process of a training pod waits for its device and cannot be killed."""
        running = self._running()
        if running:
            self.stuck.add(running[which % len(running)]["metadata"]["uid"])

    def release(self) -> None:
        """The devices answer again, and every process can be killed."""
        self.stuck.clear()
        for uid, exit_ in self.pending_ends.items():
            if uid in self.processes:
                self.end(self.processes[uid], *exit_)
        self.pending_ends.clear()

    def room(self, value: bool) -> None:
        """Say whether reshard pods find a node."""
        self.has_room = value

    def block(self, name: str, value: bool) -> None:
        """Say whether the scheduler puts no training pod on a node, for a reason that the operator cannot see."""
        (self.blocked.add if value else self.blocked.discard)(name)

    def image(self, value: bool) -> None:
        """Say whether the image of reshard pods exists."""
        self.has_image = value

    def damage(self) -> None:
        """The newest commit of the job is damaged on storage."""
        own = {uri: (item.step, item.attempt) for uri, item in self.commits.items() if item.owner == UID}
        if own:
            self.damaged.add(max(own, key=lambda uri: own[uri]))

    def refuse(self, what: str) -> None:
        """The program begins to refuse all commits of the job in one way (`Cluster.refusal`), or ceases to."""
        self.refusal = what

    def say(self, word: str) -> None:
        """The user sets `spec.checkpoint.resumeFrom`, to the newest or oldest commit of the history, or to a word."""
        names = ["/".join(item["uri"].split("/")[-2:]) for item in self.status.get("checkpoint", {}).get("history", ())]
        value = {"newest": (names or [""])[0], "oldest": (names or [""])[-1]}.get(word, word)
        if value == self.spec["checkpoint"].get("resumeFrom", ""):
            return
        self.spec["checkpoint"]["resumeFrom"] = value
        self.generation += 1
        self.touch()
        if value:
            self.passed_over = set(self.acknowledged)
            self.effects["the user says from where the job goes on"] += 1
        if value == "Beginning":
            self.begun_over = set(self.acknowledged)

    def answer(self, word: str) -> None:
        """The user answers a job that has stopped to ask, also if the field already has this value."""
        self.effects["a job stops to ask the user"] += 1
        self.say("")
        self.proceed(IDLE_SECONDS)
        self.say(word)
        self.proceed(IDLE_SECONDS)

    def suspend(self, value: bool) -> None:
        """The user suspends the job, or lets it go on."""
        self.spec["suspend"] = value
        self.generation += 1
        self.touch()

    def allot(self, count: int, seconds: float = 0.0) -> None:
        """The administrator of the queue gives it quota for so many nodes, for some time at least."""
        if self.quota is not None:
            self.quota = count
            self.proceed(seconds)

    def evict(self) -> None:
        """Kueue wants the quota of the job back."""
        if self.quota is not None:
            for (kind, _), item in list(self.objects.items()):
                if kind == "Workload" and kueue.workload_view(item).is_admitted:
                    kueue.evict(self, item, "Preempted")

    def collect(self) -> None:
        """The garbage collector removes what an earlier resource of the same name has left."""
        for key, item in list(self.objects.items()):
            if owner_of(item) == PREDECESSOR:
                del self.objects[key]
                self.touch()

    @property
    def phase(self) -> str:
        """Phase of the stored status."""
        return str(self.status.get("phase", ""))
