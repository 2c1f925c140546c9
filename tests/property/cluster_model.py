"""A model of the cluster for decisions: losses, returns, failures and operator crashes in any order.

It keeps plain API objects and does what the Job controller, the scheduler, kubelets, the trainer and the
resharder do; the operator under test is the real one, from `pod_view` to the manifests, without its HTTP calls.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

from elastic_operator.api.serialization import format_time, parse_time, to_wire
from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status_reader import read_status
from elastic_operator.cluster.caches import RenewalCache
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.commit_history import format_released
from elastic_operator.observed.observation import (
    NodeView,
    Observation,
    attempt_of,
    lease_view,
    node_view,
    pod_view,
)
from elastic_operator.observed.ownership import select_own
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import (
    Create,
    DeleteJob,
    DeletePod,
    LaunchAttempt,
    ReleaseCommits,
    RequestDrain,
    RequestStop,
    RevokeAttempt,
)
from elastic_operator.reconcile.decide import UNSETTLED, decide
from reshard.contract import CommitRef, Env, ExitCode, Label, LeaseKey, Request, ReshardReport, TrainerPhase

GPU = "amd.com/gpu"
NODES = ("n1", "n2", "n3")
STEPS = 30
EXTERNAL_STEP = 10
START = 1_800_000_000.0
NOT_READY_SECONDS = 6.0
STUCK_SECONDS = 59.0  # spec.recovery.forceDeleteSeconds, less the rounding of a deletionTimestamp

SPEC: dict[str, Any] = {
    "accelerator": {"resource": GPU, "perNode": [2]},
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


class CrashError(Exception):
    """The operator dies here."""


class World:
    """A cluster with one job. `external`: folder of an external checkpoint that the job starts from, empty for none."""

    def __init__(self, external: str = "") -> None:
        self.now = START
        self.spec = copy.deepcopy(SPEC)
        self.spec["checkpoint"]["startFrom"] = external
        self.external = f"/checkpoint/{external}" if external else ""
        self.status: dict[str, Any] = {}
        self.generation = 1
        self.serial = 0
        self.killed: dict[str, float] = {}
        self.silent: set[str] = set()
        self.stuck: set[str] = set()
        self.blocked: set[str] = set()
        self.has_room = self.has_image = True
        self.nodes = {name: self._node(name) for name in NODES}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.commits: dict[str, dict[str, Any]] = {}
        if external:
            self.commits[self.external] = {"step": EXTERNAL_STEP, "attempt": 0, "topology": {}}
        self.damaged: set[str] = set()
        self.renewals = RenewalCache()
        self.heartbeat: dict[str, float] = {}
        self.highest_attempt = 0
        self.steps = STEPS

    def _node(self, name: str) -> dict[str, Any]:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": format_time(self.now - 1000)}
        return {
            "metadata": {"name": name},
            "spec": {},
            "status": {"conditions": [ready], "allocatable": {GPU: "2"}, "capacity": {GPU: "2"}},
        }

    # -- what the operator sees and does --------------------------------------------------------------------------

    def observe(self) -> Observation:
        jobs = [item for (kind, _), item in self.objects.items() if kind == "Job"]
        leases = [item for (kind, _), item in self.objects.items() if kind == "Lease"]
        views = (lease_view(lease, self.heartbeat.get(lease["metadata"]["name"])) for lease in leases)
        everything = Observation(
            nodes={name: self._node_view(name) for name in self.nodes},
            pods=tuple(self.renewals.date_pod(pod, self.now) for pod in self.pods.values()),
            jobs=tuple(self.renewals.date_job(job, self.now) for job in jobs),
            leases=dict(enumerate(views)),
        )
        return select_own(everything, self.job, self.status.get("jobUids", ()))

    @property
    def job(self) -> JobRef:
        return JobRef(name="gpt", namespace="ns", uid="uid", generation=self.generation)

    def _node_view(self, name: str) -> NodeView:
        view = node_view(self.nodes[name])
        age = self.now - self.killed[name] if name in self.silent else 0.0
        return dataclasses.replace(view, lease_age_seconds=age)

    def operate(self, crash_after: int | None = None) -> None:
        """One pass of the operator; it may die after any of its writes."""
        status = read_status(json.loads(json.dumps(self.status))).status
        decision = decide(self.job, parse_spec(self.spec), status, self.observe(), limits=Timeouts(), now=self.now)
        assert not decision.needs_fresh_capacity
        assert not [event for event in decision.events if event.reason == UNSETTLED], "every decision settles"
        writes = 0

        def count() -> None:
            nonlocal writes
            if crash_after is not None and writes >= crash_after:
                raise CrashError
            writes += 1

        try:
            count()
            self.status = to_wire(decision.status)
            assert decision.status.attempt >= self.highest_attempt, "attempts never go back"
            self.highest_attempt = decision.status.attempt
            for action in decision.actions:
                self._act(action, count)
        except CrashError:
            pass
        self.check()

    def _act(self, action: Any, count: Any) -> None:
        match action:
            case Create(manifest=manifest):
                count()
                self._create(manifest)
            case LaunchAttempt(manifests=manifests):
                for manifest in manifests:
                    count()
                    self._create(manifest)
            case DeleteJob(name=name, uid=uid):
                count()
                job = self.objects.get(("Job", name))
                if job is not None and job["metadata"]["uid"] == uid:
                    del self.objects["Job", name]
            case DeletePod(name=name, uid=uid, grace_seconds=seconds):
                count()
                pod = self.pods.get(name)
                if pod is not None and pod["metadata"]["uid"] == uid:
                    if seconds == 0:
                        del self.pods[name]
                    else:
                        self._delete(pod)
            case RevokeAttempt(name=name):
                for kind in ("PodDisruptionBudget", "RoleBinding", "Role", "ServiceAccount", "Service", "Lease"):
                    count()
                    self.objects.pop((kind, name), None)
            case RequestDrain(lease=name):
                count()
                lease = self.objects.get(("Lease", name))
                if lease is not None:
                    lease["metadata"].setdefault("annotations", {})[LeaseKey.REQUEST] = Request.DRAIN
            case RequestStop(lease=name):
                count()
                lease = self.objects.get(("Lease", name))
                if lease is not None:
                    lease["metadata"].setdefault("annotations", {})[LeaseKey.REQUEST] = Request.STOP
            case ReleaseCommits(lease=name, names=names):
                count()
                lease = self.objects.get(("Lease", name))
                if lease is not None:
                    lease["metadata"].setdefault("annotations", {})[LeaseKey.RELEASED] = format_released(names)

    def _create(self, manifest: Any) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        if key in self.objects:
            return
        item = copy.deepcopy(dict(manifest))
        self.serial += 1
        item["metadata"] |= {"uid": f"uid-{self.serial}", "creationTimestamp": format_time(self.now)}
        item["status"] = {}
        if key[0] == "Job" and item["metadata"]["labels"][Label.ROLE] == "worker":
            self._check_launch(item)
        self.objects[key] = item

    # -- invariants ---------------------------------------------------------------------------------------------------

    def _check_launch(self, job: dict[str, Any]) -> None:
        attempt = attempt_of(job["metadata"])
        others = [pod for pod in self.pods.values() if self.runs(pod) and self.role(pod) == "worker"]
        unexpected = [pod for pod in others if not self._is_given_up(pod)]
        assert not unexpected, "an attempt is launched while pods of another one can run"
        terms = job["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
        assert all(pod["spec"]["nodeName"] in str(terms) for pod in others), "where one does not end, none begins"
        env = {item["name"]: item.get("value", "") for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}
        resume = env[Env.RESUME]
        assert resume or not self.external, "a job that starts from a checkpoint never begins from nothing"
        if resume:
            assert resume != self.external, "others' files are copied before they are used"
            assert resume in self.commits, "an attempt resumes from a commit that exists"
            assert self.commits[resume]["attempt"] <= attempt
            assert self.commits[resume]["topology"] == json.loads(env[Env.TOPOLOGY]), "in its own topology"

    def _is_given_up(self, pod: dict[str, Any]) -> bool:
        """Whether a pod does not end although it had its time, and can no longer publish anything."""
        meta = pod["metadata"]
        deleted_at = parse_time(meta.get("deletionTimestamp"))
        has_had_its_time = deleted_at is not None and self.now - deleted_at >= STUCK_SECONDS
        return meta["uid"] in self.stuck and has_had_its_time and ("Lease", meta["ownerJob"]) not in self.objects

    def check(self) -> None:
        running = {
            attempt_of(pod["metadata"])
            for pod in self.pods.values()
            if self.runs(pod) and self.role(pod) == "worker" and not self._is_given_up(pod)
        }
        assert len(running) <= 1, f"attempts {running} run at the same time"
        making_pods = [
            name
            for (kind, name), job in self.objects.items()
            if kind == "Job"
            and job["metadata"]["labels"][Label.ROLE] == "worker"
            and not job["status"].get("conditions")
        ]
        assert len(making_pods) <= 1, f"Jobs {making_pods} may create pods at the same time"

    def runs(self, pod: dict[str, Any]) -> bool:
        return pod["status"]["phase"] == "Running" and pod["spec"].get("nodeName") not in self.killed

    @staticmethod
    def role(pod: dict[str, Any]) -> str:
        return str(pod["metadata"]["labels"][Label.ROLE])

    # -- what the rest of the world does ------------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for name, since in self.killed.items():
            if self.now - since >= NOT_READY_SECONDS and name not in self.silent:
                self._set_ready(name, "Unknown")
        self._delete_pods()
        for (kind, name), job in list(self.objects.items()):
            if kind == "Job":
                self._job_controller(name, job)
        self._schedule()
        for pod in list(self.pods.values()):
            if self.runs(pod):
                (self._reshard if self.role(pod) == "reshard" else self._train)(pod)
        self.check()

    def _set_ready(self, name: str, value: str) -> None:
        (condition,) = self.nodes[name]["status"]["conditions"]
        if condition["status"] != value:
            condition |= {"status": value, "lastTransitionTime": format_time(self.now)}

    def _delete_pods(self) -> None:
        for name, pod in list(self.pods.items()):
            owner = self.objects.get(("Job", pod["metadata"]["ownerJob"]))
            orphan = owner is None or owner["metadata"]["uid"] != pod["metadata"]["ownerUid"]
            if orphan:
                self._delete(pod)
            node, end = pod["spec"].get("nodeName"), pod["metadata"].get("deletionTimestamp")
            dies = pod["metadata"]["uid"] not in self.stuck or pod["status"]["phase"] in ("Succeeded", "Failed")
            if end is None or end > format_time(self.now) or node in self.killed or not dies:
                continue
            if pod["metadata"].pop("graceful", False) and pod["status"]["phase"] == "Running":
                pod["status"] |= _terminated("Failed", 137)  # the Job controller counts it before it goes
            else:
                del self.pods[name]

    def _delete(self, pod: dict[str, Any], grace: float = 0.0) -> None:
        """Delete a pod with a grace period; a second deletion may only shorten it."""
        end = format_time(self.now + grace)
        pod["metadata"]["deletionTimestamp"] = min(end, pod["metadata"].get("deletionTimestamp", end))
        pod["metadata"]["graceful"] = grace > 0

    def _job_controller(self, name: str, job: dict[str, Any]) -> None:
        pods = [pod for pod in self.pods.values() if pod["metadata"]["ownerUid"] == job["metadata"]["uid"]]
        count = job["spec"].get("completions", 1)
        if job["status"].get("conditions"):
            return
        phases = [pod["status"]["phase"] for pod in pods]
        if "Failed" in phases:
            job["status"]["conditions"] = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
            for pod in pods:
                if pod["status"]["phase"] not in ("Succeeded", "Failed"):
                    self._delete(pod)
        elif phases.count("Succeeded") == count:
            job["status"]["conditions"] = [{"type": "Complete", "status": "True"}]
        else:
            taken = {pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index") for pod in pods}
            for index in range(count):
                if str(index) not in taken:
                    self._make_pod(name, job, index)

    def _make_pod(self, name: str, job: dict[str, Any], index: int) -> None:
        self.serial += 1
        template = copy.deepcopy(job["spec"]["template"])
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": str(index)}
        self.pods[f"{name}-{index}-{self.serial}"] = {
            "metadata": {
                "namespace": "ns",
                "name": f"{name}-{index}-{self.serial}",
                "uid": f"uid-{self.serial}",
                "labels": labels,
                "creationTimestamp": format_time(self.now),
                "ownerReferences": [
                    {"kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True},
                ],
                "ownerJob": name,
                "ownerUid": job["metadata"]["uid"],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }

    def _schedule(self) -> None:
        for pod in self.pods.values():
            if pod["status"]["phase"] != "Pending" or "deletionTimestamp" in pod["metadata"]:
                continue
            if self.role(pod) == "reshard" and self._is_held(pod):
                continue
            if "nodeName" in pod["spec"]:
                if pod["spec"]["nodeName"] not in self.killed:
                    pod["status"] = {**pod["status"], "phase": "Running"}
                continue
            view = pod_view(pod)
            terms = (
                pod["spec"]
                .get("affinity", {})
                .get("nodeAffinity", {})
                .get("requiredDuringSchedulingIgnoredDuringExecution", {})
                .get("nodeSelectorTerms", [{}])
            )
            avoided = {field["values"][0] for field in terms[0].get("matchFields", [])}
            if self.role(pod) == "worker":
                avoided |= self.blocked
            for name, node in self.nodes.items():
                held = sum(
                    pod_view(other).requests.get(GPU, 0)
                    for other in self.pods.values()
                    if other["spec"].get("nodeName") == name and other["status"]["phase"] in ("Pending", "Running")
                )
                ready = node["status"]["conditions"][0]["status"] == "True"
                if ready and name not in avoided and held + view.requests.get(GPU, 0) <= 2:
                    pod["spec"]["nodeName"] = name
                    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(self.now)}
                    phase = "Running" if name not in self.killed else "Pending"
                    pod["status"] = {"phase": phase, "conditions": [placed]}
                    break
            else:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
                pod["status"] = {"phase": "Pending", "conditions": [condition]}

    def _is_held(self, pod: dict[str, Any]) -> bool:
        """Show in a reshard pod why it cannot start; False if it can."""
        if "nodeName" not in pod["spec"] and not self.has_room:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
        elif not self.has_image:
            pod["spec"].setdefault("nodeName", NODES[0])
            waiting = {"name": "reshard", "state": {"waiting": {"reason": "ErrImagePull", "message": "no image"}}}
            pod["status"] = {"phase": "Pending", "containerStatuses": [waiting]}
        else:
            return False
        return True

    def _env(self, pod: dict[str, Any]) -> dict[str, str]:
        return {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}

    def _train(self, pod: dict[str, Any]) -> None:
        """Rank 0 moves the whole attempt: a step per tick once all pods run, a commit every third."""
        meta = pod["metadata"]
        name = meta["ownerJob"]
        lease = self.objects.get(("Lease", name))
        if meta["labels"]["batch.kubernetes.io/job-completion-index"] != "0" or lease is None:
            return
        env = self._env(pod)
        peers = [other for other in self.pods.values() if other["metadata"]["ownerJob"] == name]
        everybody = len(peers) == int(env["PET_NNODES"]) and all(map(self.runs, peers))
        lease["spec"]["renewTime"] = format_time(self.now)
        self.heartbeat[name] = self.now
        notes = lease["metadata"].setdefault("annotations", {})
        if not everybody:
            notes.setdefault(LeaseKey.PHASE, TrainerPhase.STARTING)
            return
        if env[Env.RESUME] in self.damaged:
            notes[LeaseKey.RESUME_ERROR] = "CRC differs"
            pod["status"] = _terminated("Failed", 76)
            return
        step = int(notes.get(LeaseKey.STEP) or (self.commits[env[Env.RESUME]]["step"] if env[Env.RESUME] else 0))
        draining = notes.get(LeaseKey.REQUEST) == Request.DRAIN
        if not draining:
            step += 1
        notes |= {
            LeaseKey.STEP: str(step),
            LeaseKey.PHASE: TrainerPhase.TRAINING,
            LeaseKey.STEP_TIME: format_time(self.now),
        }
        notes.setdefault(LeaseKey.FIRST_STEP_TIME, format_time(self.now))
        if step % 3 == 0 or draining or step >= self.steps:
            uri = f"{env[Env.CHECKPOINT_ROOT]}/a{env[Env.ATTEMPT]}/step-{step:08d}"
            ref = CommitRef(
                uri=uri,
                step=step,
                samples=20 * step,
                attempt=int(env[Env.ATTEMPT]),
                topology=json.loads(env[Env.TOPOLOGY]),
            )
            self.commits[uri] = {"step": step, "attempt": ref.attempt, "topology": dict(ref.topology)}
            notes[LeaseKey.COMMIT] = ref.to_json()
            released = json.loads(notes.get(LeaseKey.RELEASED) or "[]")
            for item in released:
                self.commits.pop(f"{env[Env.CHECKPOINT_ROOT]}/{item}", None)
            notes[LeaseKey.REMOVED] = json.dumps(released)
        if step >= self.steps:
            notes[LeaseKey.PHASE] = TrainerPhase.COMPLETE
            for other in peers:
                other["status"] = _terminated("Succeeded", 0)
        elif draining:
            notes[LeaseKey.PHASE] = TrainerPhase.DRAINED
            for other in peers:
                other["status"] = _terminated("Failed", 75)

    def _reshard(self, pod: dict[str, Any]) -> None:
        source, target = pod["spec"]["containers"][0]["args"][1:3]
        assert source in self.commits, "a reshard Job reads a commit that exists"
        attempt = attempt_of(pod["metadata"])
        if source in self.damaged:
            report = ReshardReport(ok=False, exit_code=ExitCode.SOURCE_INVALID, message="CRC differs")
            pod["status"] = _terminated("Failed", ExitCode.SOURCE_INVALID, report.to_json())
            return
        words = dict(part.split("=") for part in pod["spec"]["containers"][0]["args"][4].split(","))
        topology = {
            "tp": 1,
            "pp": 1,
            "dp": 1,
            "ep": 1,
            "cp": 1,
            "zero": 1,
            **{key: int(value) for key, value in words.items()},
        }
        self.commits[target] = {"step": self.commits[source]["step"], "attempt": attempt, "topology": topology}
        step = self.commits[source]["step"]
        report = ReshardReport(
            ok=True, exit_code=0, message="done", source=source, target=target, step=step, verified=True
        )
        pod["status"] = _terminated("Succeeded", 0, report.to_json())

    # -- what happens to it -------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        self.killed.setdefault(name, self.now)

    def silence(self, name: str) -> None:
        """The node is lost, and only its Lease shows it: nobody sets its Ready condition."""
        if name not in self.killed:
            self.kill(name)
            self.silent.add(name)

    def heal(self, name: str) -> None:
        if self.killed.pop(name, None) is None:
            return
        self.silent.discard(name)
        self._set_ready(name, "True")
        for pod in self.pods.values():
            if pod["spec"].get("nodeName") == name and pod["status"]["phase"] == "Running":
                pod["status"] = _terminated("Failed", 255, reason="Unknown")

    def fail_pod(self, which: int) -> None:
        running = [pod for pod in self.pods.values() if self.runs(pod)]
        if running:
            running[which % len(running)]["status"] = _terminated("Failed", 1)

    def preempt(self, which: int, grace: float) -> None:
        """A pod of higher priority takes the place of a pod, which runs on until its grace period ends."""
        running = [pod for pod in self.pods.values() if self.runs(pod) and self.role(pod) == "worker"]
        if running:
            pod = running[which % len(running)]
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            pod["status"]["conditions"] = [condition | {"lastTransitionTime": format_time(self.now)}]
            self._delete(pod, grace)

    def stick(self, which: int) -> None:
        """A process of a training pod waits for its device and cannot be killed."""
        running = [pod for pod in self.pods.values() if self.runs(pod) and self.role(pod) == "worker"]
        if running:
            self.stuck.add(running[which % len(running)]["metadata"]["uid"])

    def release(self) -> None:
        """The devices answer again, and every process can be killed."""
        self.stuck.clear()

    def room(self, value: bool) -> None:
        """Whether reshard pods find a node."""
        self.has_room = value

    def block(self, name: str, value: bool) -> None:
        """Whether the scheduler puts no training pod on a node, for a reason that the operator cannot see."""
        (self.blocked.add if value else self.blocked.discard)(name)

    def image(self, value: bool) -> None:
        """Whether the image of reshard pods exists."""
        self.has_image = value

    def damage(self) -> None:
        own = {uri: (item["step"], item["attempt"]) for uri, item in self.commits.items() if uri != self.external}
        if own:
            self.damaged.add(max(own, key=lambda uri: own[uri]))

    def suspend(self, value: bool) -> None:
        self.spec["suspend"] = value
        self.generation += 1

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))


def _terminated(phase: str, code: int, message: str = "", reason: str = "") -> dict[str, Any]:
    state = {"terminated": {"exitCode": int(code), "message": message, "reason": reason}}
    return {"phase": phase, "containerStatuses": [{"name": "train", "state": state}]}
