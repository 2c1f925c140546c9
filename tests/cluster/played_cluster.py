"""The surroundings of one job, played against a real API server: Job controller, scheduler, kubelets, trainer.

Everything here talks to the API server directly, never through the fault proxy. It also checks, at every change that
the API server reports, what must hold at any time.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from elastic_operator.api.serialization import format_time
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError
from elastic_operator.client.resources import (
    ACCOUNT,
    JOB,
    LEASE,
    NODE,
    POD,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    TRAINING_JOB,
    ResourceKind,
)
from elastic_operator.observed.observation import attempt_of, controller_of
from reshard.contract import (
    Env,
    ExitCode,
    Label,
    LeaseKey,
    Request,
    ReshardReport,
    TrainerExit,
    TrainerPhase,
)
from reshard.errors import NotOwnerError
from tests.cluster.fault_proxy import LANE
from tests.cluster.played_volume import PlayedVolume, root_of

GPU = "amd.com/gpu"
NAME = "gpt"
NUM_NODES = 3
SPEC: dict[str, Any] = {
    "accelerator": {"resource": GPU, "perNode": [2]},
    "nodes": {"min": 1, "max": NUM_NODES},
    "parallelism": {"tensor": [1, 2], "pipeline": [1, 2, 3]},
    "batch": {"globalSamples": 20, "microSamples": 2},
    "checkpoint": {"claimName": "ckpt", "path": "gpt", "intervalSeconds": 600},
    "recovery": {
        "suspectSeconds": 1,
        "forceDeleteSeconds": 0,
        "scaleUpStableSeconds": 0,
        "excludeNodeSeconds": 0,
        "drainSeconds": 600,
        "hangSeconds": 86400,
        "restartBudget": {"limit": 1000, "windowSeconds": 86400},
    },
    "template": {"spec": {"containers": [{"name": "train", "image": "train:1"}]}},
}
_INDEX = "batch.kubernetes.io/job-completion-index"

Object = dict[str, Any]


class PlayedCluster:
    """The cluster of one lane: a namespace with one job, and its nodes.

    Attributes:
        problems: what must hold at any time, and did not.
        job: the resource as the API server reported it last.
        volume: where the commits are.
        dead_owners: UIDs of resources of the job's name that were deleted.
    """

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.nodes = [f"{namespace}-{number}" for number in range(1, NUM_NODES + 1)]
        self.dead: set[str] = set()
        self.problems: list[str] = []
        self.job: Object = {}
        self.objects: dict[str, dict[str, Object]] = {"jobs": {}, "pods": {}, "leases": {}}
        self.changed = asyncio.Event()
        self.volume = PlayedVolume(self.problems)
        self.dead_owners: set[str] = set()
        self._trained: set[str] = set()
        self._created: dict[tuple[str, str, str], set[str]] = {}
        self._attempts: dict[tuple[str, int], str] = {}

    async def create(self) -> None:
        """Create namespace, nodes and job."""
        await self._create_namespace()
        await self.create_job(SPEC)

    async def _create_namespace(self) -> None:
        meta = {"name": self.namespace}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": meta}
        await self._client.create(ResourceKind("", "v1", "Namespace", "namespaces"), namespace)
        account = {"name": "default", "namespace": self.namespace}
        await self._client.create(ACCOUNT, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        for name in self.nodes:
            labels = {LANE: self.namespace}
            await self._client.create(
                NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
            )
            await self.set_ready(name, "True")
            lease = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": name, "namespace": "kube-node-lease", "labels": labels},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 1_000_000, "renewTime": _now()},
            }  # fmt: skip
            await self._client.create(LEASE, lease)

    async def create_job(self, spec: Mapping[str, Any]) -> None:
        """Create the job."""
        resource = {
            "apiVersion": "elastictraining.dev/v1beta1", "kind": "ElasticTrainingJob",
            "metadata": {"name": NAME, "namespace": self.namespace}, "spec": spec,
        }  # fmt: skip
        self.job = await self._client.create(TRAINING_JOB, resource)

    @property
    def status(self) -> Mapping[str, Any]:
        return self.job.get("status") or {}

    async def run(self) -> None:
        """React to every change, forever."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            try:
                await self._react()
            except ApiError as error:
                # The operator has deleted or changed it in between: look again.
                if error.code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
                    raise
                self.changed.set()
                await asyncio.sleep(0.05)

    # -- what the API server reports --------------------------------------------------------------------------------

    def put(self, plural: str, item: Object) -> None:
        """Take note of a new or changed object."""
        meta = item["metadata"]
        if plural == "elastictrainingjobs":
            self._put_job_resource(item)
            return
        known = self.objects[plural].get(meta["name"])
        if known is not None and int(known["metadata"]["resourceVersion"]) >= int(meta["resourceVersion"]):
            return
        if known == item:
            return
        self.objects[plural][meta["name"]] = item
        uids = self._created.setdefault((owner_of(item), plural, meta["name"]), set())
        uids.add(meta["uid"])
        # What is created for a deleted resource is collected, perhaps while it is created.
        if plural != "pods" and len(uids) > 1 and owner_of(item) not in self.dead_owners:
            self.problems.append(f"{plural}/{meta['name']} was created {len(uids)} times")
        if plural == "jobs":
            self._check_jobs()
        self.changed.set()

    def drop(self, plural: str, name: str) -> None:
        """Take note of a deletion."""
        if plural != "elastictrainingjobs":
            self.objects[plural].pop(name, None)
        self.changed.set()

    def _put_job_resource(self, item: Object) -> None:
        meta, known = item["metadata"], self.job.get("metadata", {})
        if meta["uid"] in self.dead_owners:
            return
        before, after = self.status.get("attempt", 0), (item.get("status") or {}).get("attempt", 0)
        if after < before and meta["uid"] == known.get("uid"):
            self.problems.append(f"attempt went back from {before} to {after}")
        self.job = item
        self.changed.set()

    def _check_jobs(self) -> None:
        live = [
            name
            for name, job in self.objects["jobs"].items()
            if _role(job) == "worker" and "deletionTimestamp" not in job["metadata"] and not _has_failed(job)
        ]
        if len(live) > 1:
            self.problems.append(f"worker Jobs at the same time: {', '.join(sorted(live))}")

    # -- what the controllers and kubelets do -----------------------------------------------------------------------

    async def _react(self) -> None:
        for name, pod in list(self.objects["pods"].items()):
            await self._stop(name, pod)
        for name, job in list(self.objects["jobs"].items()):
            if not job.get("status", {}).get("conditions"):
                await self._run_job(name, job)
        for name, lease in list(self.objects["leases"].items()):
            await self._train(name, lease)

    async def _stop(self, name: str, pod: Object) -> None:
        """Garbage collector and kubelet."""
        owner = pod["metadata"]["ownerReferences"][0]
        job = self.objects["jobs"].get(owner["name"])
        is_orphan = job is None or job["metadata"]["uid"] != owner["uid"]
        is_deleted = "deletionTimestamp" in pod["metadata"]
        if pod["spec"]["nodeName"] in self.dead:
            if is_orphan and not is_deleted:
                await self._delete_pod(name, pod, 1)
        elif is_orphan or is_deleted:
            await self._delete_pod(name, pod, 0)

    async def _delete_pod(self, name: str, pod: Object, grace: int) -> None:
        uid = {"uid": pod["metadata"]["uid"]}
        await self._client.delete(POD, name, namespace=self.namespace, preconditions=uid, gracePeriodSeconds=grace)
        if not grace:
            self.drop("pods", name)

    async def _run_job(self, name: str, job: Object) -> None:
        """Job controller, scheduler, kubelet and resharder."""
        own = {pod["metadata"]["labels"][_INDEX]: pod for pod in self._pods_of(job)}
        if any(_phase(pod) == "Failed" for pod in own.values()):
            # It has no other conditions yet: `Failed` follows when all its pods have ended.
            failed = {"type": "FailureTarget", "status": "True", "reason": "BackoffLimitExceeded"}
            status = {"startTime": _now(), "conditions": [{**failed, "lastTransitionTime": _now()}]}
            await self._patch(JOB, name, {"status": status}, subresource="status")
            return
        if _role(job) == "worker" and not own:
            self._check_launch(name, job)
        for index in range(job["spec"].get("completions") or 1):
            pod = own.get(str(index)) or await self._create_pod(name, job, index)
            if pod is not None and pod["status"]["phase"] == "Pending":
                own[str(index)] = await self._set_pod(pod, self._first_status(job, pod))
        if _role(job) == "reshard" and own and all(_phase(pod) == "Succeeded" for pod in own.values()):
            now = _now()
            done = [
                {"type": kind, "status": "True", "lastTransitionTime": now}
                for kind in ("SuccessCriteriaMet", "Complete")
            ]
            status = {"startTime": now, "completionTime": now, "succeeded": 1, "conditions": done}
            await self._patch(JOB, name, {"status": status}, subresource="status")

    async def _create_pod(self, name: str, job: Object, index: int) -> Object | None:
        template = copy.deepcopy(job["spec"]["template"])
        node = self._choose_node(template["spec"])
        if node is None:
            return None
        uid = job["metadata"]["uid"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "controller": True}
        meta = {
            **template["metadata"], "name": f"{name}-{index}", "namespace": self.namespace, "ownerReferences": [owner],
            "labels": {**template["metadata"]["labels"], _INDEX: str(index)},
        }  # fmt: skip
        spec = {key: value for key, value in template["spec"].items() if not key.startswith("serviceAccount")}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {**spec, "nodeName": node}}
        try:
            made = await self._client.create(POD, pod)
        except ApiError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
            return None
        self.put("pods", made)
        return made

    def _choose_node(self, spec: Mapping[str, Any]) -> str | None:
        terms = (
            spec.get("affinity", {}).get("nodeAffinity", {})
            .get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [{}])
        )  # fmt: skip
        avoided = {field["values"][0] for field in terms[0].get("matchFields", [])}
        needs_gpus = GPU in spec["containers"][0].get("resources", {}).get("limits", {})
        taken = {
            pod["spec"]["nodeName"]
            for pod in self.objects["pods"].values()
            if _role(pod) == "worker" and not _ended(pod)
        }
        free = [name for name in self.nodes if name not in self.dead | avoided | (taken if needs_gpus else set())]
        return free[0] if free else None

    def _first_status(self, job: Object, pod: Object) -> Object:
        if _role(job) == "worker":
            scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _now()}
            return {"phase": "Running", "conditions": [scheduled], "startTime": _now()}
        env, arguments = _env(job["spec"]["template"]), pod["spec"]["containers"][0]["args"]
        source, target = arguments[1:3]
        degrees = {key: int(value) for key, value in (part.split("=") for part in arguments[4].split(","))}
        try:
            commit = self.volume.convert(env, source, target, degrees, any_commit="--newest" in arguments)
        except NotOwnerError as error:
            return _refused_conversion(pod, ExitCode.NOT_OWNER, str(error))
        except FileNotFoundError as error:
            return _refused_conversion(pod, ExitCode.SOURCE_INVALID, str(error))
        if commit is None:
            nothing = ReshardReport(ok=True, exit_code=0, message="there is no commit", source=source)
            return _terminated(pod, "Succeeded", 0, nothing.to_json())
        report = ReshardReport(
            ok=True, exit_code=0, message="done", source=commit.uri, target=target, step=commit.step,
            samples=20 * commit.step, verified=True,
        )  # fmt: skip
        return _terminated(pod, "Succeeded", 0, report.to_json())

    def _check_launch(self, name: str, job: Object) -> None:
        """Check what must hold when the pods of an attempt begin to run."""
        running = [
            pod["metadata"]["name"]
            for pod in self.objects["pods"].values()
            if _role(pod) == "worker" and not _ended(pod) and pod["spec"]["nodeName"] not in self.dead
            and "deletionTimestamp" not in pod["metadata"]
        ]  # fmt: skip
        if running:
            self.problems.append(f"{name} was launched while pods of another attempt run: {running}")
        env = _env(job["spec"]["template"])
        attempt, resume, uid = attempt_of(job["metadata"]), env[Env.RESUME], env[Env.JOB_UID]
        if self._attempts.setdefault((uid, attempt), job["metadata"]["uid"]) != job["metadata"]["uid"]:
            self.problems.append(f"attempt {attempt} was launched by two Jobs")
        commit = self.volume.find(resume) if resume else None
        if resume and (commit is None or commit.topology != json.loads(env[Env.TOPOLOGY])):
            self.problems.append(f"{name} resumes from {resume}, which is {commit}")
        if not resume and any(commit.uid == uid for commit in self.volume.commits(root_of(env))):
            self.problems.append(f"{name} starts from nothing, although there are commits")

    async def _train(self, name: str, lease: Object) -> None:
        """Rank 0: report the first step and a commit, remove released commits, commit and exit when asked to drain."""
        notes = lease["metadata"].get("annotations") or {}
        job = self.objects["jobs"].get(name)
        if job is None or notes.get(LeaseKey.PHASE) == TrainerPhase.DRAINED:
            return
        env, pods = _env(job["spec"]["template"]), self._pods_of(job)
        is_running = len(pods) == job["spec"]["completions"] and all(
            _phase(pod) == "Running" and pod["spec"]["nodeName"] not in self.dead for pod in pods
        )
        if not is_running or owner_of(lease) != env[Env.JOB_UID]:
            return
        uid = lease["metadata"]["uid"]
        try:
            step = self._step_to_save(uid, env, notes)
            commit = self.volume.prepare(env, step) if step is not None else None
        except NotOwnerError as error:
            await self._report(name, uid, {LeaseKey.OWNER_ERROR: str(error)})
            await self._exit(pods, TrainerExit.NOT_OWNER)
            return
        changes: dict[str, str] = {}
        if commit is not None:
            changes = {LeaseKey.PHASE: TrainerPhase.TRAINING, LeaseKey.STEP_TIME: _now(), **commit.notes(env)}
            if LeaseKey.STEP not in notes:
                changes[LeaseKey.FIRST_STEP_TIME] = _now()
            if notes.get(LeaseKey.REQUEST) == Request.DRAIN and LeaseKey.STEP in notes:
                changes[LeaseKey.PHASE] = TrainerPhase.DRAINED
        released = notes.get(LeaseKey.RELEASED) or "[]"
        if released != (notes.get(LeaseKey.REMOVED) or "[]"):
            for item in json.loads(released):
                self.volume.remove(env, item)
            changes[LeaseKey.REMOVED] = released
        if changes:
            await self._report(name, uid, changes)
            self._trained.add(uid)
            if commit is not None:  # the Lease has answered
                self.volume.publish(commit, int(env[Env.ATTEMPT]))
        if changes.get(LeaseKey.PHASE) == TrainerPhase.DRAINED:
            await self._exit(pods, TrainerExit.DRAINED)

    async def _exit(self, pods: list[Object], code: int) -> None:
        for pod in pods:
            await self._set_pod(pod, _terminated(pod, "Failed", code))

    def _step_to_save(self, lease: str, env: Mapping[str, str], notes: Mapping[str, str]) -> int | None:
        """Return the step that rank 0 saves now, None for none."""
        if lease not in self._trained:
            resume = self.volume.find(env[Env.RESUME]) if env[Env.RESUME] else None
            return resume.step + 1 if resume else 1
        # One whose resource was deleted does not know that: it goes on, and saves once more.
        is_zombie = env[Env.JOB_UID] in self.dead_owners and f"zombie {lease}" not in self._trained
        if is_zombie:
            self._trained.add(f"zombie {lease}")
        if is_zombie or notes.get(LeaseKey.REQUEST) == Request.DRAIN:
            return int(notes.get(LeaseKey.STEP, 0)) + 1
        return None

    async def _report(self, name: str, uid: str, changes: Mapping[str, str]) -> None:
        """Renew the Lease of this UID."""
        meta = {"uid": uid, "annotations": dict(changes)}
        await self._patch(LEASE, name, {"metadata": meta, "spec": {"renewTime": _now(), "holderIdentity": "rank-0"}})

    # -- what happens to it -----------------------------------------------------------------------------------------

    async def set_ready(self, name: str, value: str) -> None:
        """Set a node's condition Ready."""
        amounts = {GPU: "2", "cpu": "8", "memory": "8Gi", "pods": "110"}
        ready = {"type": "Ready", "status": value, "reason": "Played", "message": "", "lastTransitionTime": _now()}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        await self._client.patch(NODE, name, {"status": status}, subresource="status")

    async def lose_node(self) -> None:
        """Take the power of a node that runs a pod, but not rank 0."""
        pod = next(pod for pod in self.workers() if pod["metadata"]["labels"][_INDEX] == "1")
        self.dead.add(pod["spec"]["nodeName"])
        await self.set_ready(pod["spec"]["nodeName"], "Unknown")

    async def return_node(self) -> None:
        """Switch the node on again; its kubelet removes what it should no longer run."""
        name = self.dead.pop()
        await self.set_ready(name, "True")
        self.changed.set()

    async def crash_pod(self) -> None:
        """End a pod with an error."""
        await self._set_pod(self.workers()[0], _terminated(self.workers()[0], "Failed", 1))

    def workers(self) -> list[Object]:
        """Return the running training pods, by rank."""
        pods = [pod for pod in self.objects["pods"].values() if _role(pod) == "worker" and _phase(pod) == "Running"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def leftovers(self) -> list[str]:
        """List what there still is of attempts before the current one, besides what stays for its logs."""
        attempt = self.status.get("attempt", 0)
        return [
            f"{plural}/{name}"
            for plural, items in self.objects.items()
            for name, item in items.items()
            if attempt_of(item["metadata"]) != attempt
            and _role(item) != "reshard"
            and not (_has_failed(item) or (plural == "pods" and _phase(item) == "Failed"))
        ]

    def remains(self) -> list[str]:
        """List everything that has to go before the job is at rest."""
        return self.leftovers()

    async def unfenced(self) -> list[str]:
        """List the rights, accounts and Services of attempts before the current one."""
        attempt = self.status.get("attempt", 0)
        return [
            f"{kind.plural}/{item['metadata']['name']}"
            for kind in (ROLE_BINDING, ROLE, ACCOUNT, SERVICE)
            async for item in self._client.list_objects(kind, namespace=self.namespace, labels=str(Label.JOB))
            if attempt_of(item["metadata"]) != attempt
        ]

    def _pods_of(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [pod for pod in self.objects["pods"].values() if pod["metadata"]["ownerReferences"][0]["uid"] == uid]

    async def _set_pod(self, pod: Object, status: Object) -> Object:
        return await self._patch(POD, pod["metadata"]["name"], {"status": status}, subresource="status")

    async def _patch(self, kind: ResourceKind, name: str, changes: Object, *, subresource: str = "") -> Object:
        made = await self._client.patch(kind, name, changes, namespace=self.namespace, subresource=subresource)
        known = self.objects[kind.plural].get(name)
        if known is not None and known["metadata"]["uid"] == made["metadata"]["uid"]:
            self.put(kind.plural, made)  # else its deletion was reported before this answer came
        return made


def owner_of(item: Object) -> str:
    """Return the UID of an object's controller: of a pod its Job, of anything else the resource."""
    return str(controller_of(item["metadata"]).get("uid", ""))


def _role(item: Object) -> str:
    return str(item["metadata"].get("labels", {}).get(Label.ROLE, ""))


def _has_failed(job: Object) -> bool:
    """Return whether a Job has failed, and creates no pods any more."""
    return any(item["type"] == "FailureTarget" for item in (job.get("status") or {}).get("conditions") or ())


def _phase(pod: Object) -> str:
    return str(pod["status"].get("phase", "Pending"))


def _ended(pod: Object) -> bool:
    return _phase(pod) in ("Succeeded", "Failed")


def _env(template: Object) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in template["spec"]["containers"][0]["env"]}


def _terminated(pod: Object, phase: str, code: int, message: str = "") -> Object:
    now = _now()
    ended = {"exitCode": code, "message": message, "startedAt": now, "finishedAt": now}
    container = {
        "name": pod["spec"]["containers"][0]["name"], "image": "train:1", "imageID": "", "ready": False,
        "restartCount": 0, "state": {"terminated": ended},
    }  # fmt: skip
    return {"phase": phase, "containerStatuses": [container]}


def _refused_conversion(pod: Object, code: ExitCode, message: str) -> Object:
    report = ReshardReport(ok=False, exit_code=code, message=message)
    return _terminated(pod, "Failed", code, report.to_json())


def _now() -> str:
    return format_time(time.time())[:-1] + "000Z"
