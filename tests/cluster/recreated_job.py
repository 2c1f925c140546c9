"""A lane whose job is deleted at random moments, and created again under the same name.

There is no garbage collector: `RecreatedCluster` plays it, at once or only when the new job has said what it waits for.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import enum
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError
from elastic_operator.client.resources import (
    ACCOUNT,
    DISRUPTION_BUDGET,
    JOB,
    LEASE,
    REVISION,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    TRAINING_JOB,
)
from elastic_operator.manifests.attempt import CHECKPOINT_MOUNT, DRAIN_REQUESTED, RETRY_REQUESTED
from elastic_operator.observed.pod_diagnosis import NAME_TAKEN, PREDECESSOR_RUNS
from reshard.contract import Label, TakeOver
from tests.cluster.fault_harness import Start
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.played_cluster import NAME, NUM_NODES, SPEC, PlayedCluster, owner_of
from tests.cluster.recovery_lane import QUIET_SECONDS, Lane, LaneError

OWNED = (JOB, LEASE, SERVICE, ROLE, ROLE_BINDING, ACCOUNT, DISRUPTION_BUDGET, REVISION)
COLLECT_SECONDS = 0.5
LATE_CONTROLLER_SECONDS = 2.0

REFUSED = "refused: CheckpointOwned is False"
REFUSED_SOURCE = "refused: ReshardFailed, there is no commit to start from"
RESUMED = "resumed from the old path"
FROM_NOTHING = "runs from nothing in a path without an owner"
TAKEN_OVER = "took the path over"
RESUMED_IN_PLACE = "took the path over, and resumed"


class Mode(enum.StrEnum):
    """How the job is created again."""

    SAME = "same path"
    TAKE_OVER = "takeOver: Begin"
    RESUME = "takeOver: Resume"
    TAKE_OVER_LATER = "takeOver: Begin and a retry after the refusal"
    RESUME_LATER = "takeOver: Resume and a retry after the refusal"
    START_FROM = "startFrom the old path"


_LATER = {Mode.TAKE_OVER_LATER: TakeOver.BEGIN, Mode.RESUME_LATER: TakeOver.RESUME}


@dataclasses.dataclass(frozen=True, slots=True)
class Deletion:
    """A deletion, and the creation after it.

    Attributes:
        begin: what happens to the job before: a failure, or a request to drain; None for nothing.
        number: the deletion comes before this request of the operator; earlier if the job comes to rest before.
        seconds: time from the deletion to the creation; 0: before the request goes on.
        kills: the operator dies just after that.
    """

    mode: Mode
    begin: Callable[[RecreatedCluster], Awaitable[None]] | None
    number: int
    seconds: float
    kills: bool

    def __str__(self) -> str:
        begin = f"{self.begin.__name__}, " if self.begin else ""
        killed = ", operator killed" if self.kills else ""
        return f"{begin}request {self.number}, {self.seconds:g} s, {self.mode}{killed}"


class RecreatedCluster(PlayedCluster):
    """A cluster with a garbage collector, which may be late.

    Every second one has enough nodes for a job and for the pods of its predecessor.

    Attributes:
        is_collecting: the garbage collector works.
        path: `spec.checkpoint.path` of the job.
    """

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        super().__init__(client, namespace)
        if int(namespace.rsplit("-", 1)[1]) % 2:
            self.nodes += [f"{namespace}-{number}" for number in range(NUM_NODES + 1, 2 * NUM_NODES + 1)]
        self.is_collecting = True
        self.path = str(SPEC["checkpoint"]["path"])
        self.spec: dict[str, Any] = copy.deepcopy(SPEC)
        self.num_created = 1
        self._deleted_at: dict[str, float] = {}
        self._random = random.Random(namespace)

    @property
    def uid(self) -> str:
        """UID of the job."""
        return str(self.job["metadata"]["uid"])

    async def _run_job(self, name: str, job: dict[str, Any]) -> None:
        """Let the Job controller be late for a Job whose resource was deleted."""
        seconds = self._deleted_at.get(owner_of(job), 0.0) + LATE_CONTROLLER_SECONDS - time.monotonic()
        if seconds > 0 and not self._pods_of(job):
            asyncio.get_running_loop().call_later(seconds, self.changed.set)
            return
        await super()._run_job(name, job)

    async def delete_job(self) -> None:
        """Delete the job as `kubectl delete` does by default."""
        self.dead_owners.add(self.uid)
        self._deleted_at[self.uid] = time.monotonic()
        await self._client.delete(TRAINING_JOB, NAME, namespace=self.namespace, propagationPolicy="Background")

    async def recreate_job(self, mode: Mode) -> None:
        """Create the job again."""
        self.num_created += 1
        fields: dict[str, Any] = {}
        if mode is Mode.START_FROM:
            fields["startFrom"], self.path = self.path, f"gpt-{self.num_created}"
        elif mode is Mode.TAKE_OVER:
            fields["takeOver"] = TakeOver.BEGIN.value
        elif mode is Mode.RESUME:
            fields["takeOver"] = TakeOver.RESUME.value
        self.spec = copy.deepcopy(SPEC)
        self.spec["checkpoint"] |= {"path": self.path, **fields}
        await self.create_job(self.spec)

    async def take_over(self, word: TakeOver) -> None:
        """Set `takeOver`, and ask for a retry, as the refusal says."""
        await self._client.patch(
            TRAINING_JOB,
            NAME,
            {
                "metadata": {"annotations": {RETRY_REQUESTED: str(self.num_created)}},
                "spec": {"checkpoint": {"takeOver": word.value}},
            },
            namespace=self.namespace,
        )
        self.spec["checkpoint"]["takeOver"] = word.value

    async def request_drain(self) -> None:
        """Ask for a commit and a new attempt."""
        notes = {"annotations": {DRAIN_REQUESTED: str(self.num_created)}}
        await self._client.patch(TRAINING_JOB, NAME, {"metadata": notes}, namespace=self.namespace)

    async def collect(self) -> int:
        """Delete objects whose owner is gone, in any order; return how many there were."""
        count = 0
        for kind in self._random.sample(OWNED, len(OWNED)):
            items = [
                item async for item in self._client.list_objects(kind, namespace=self.namespace, labels=str(Label.JOB))
            ]
            for item in items:
                if owner_of(item) in self.dead_owners:
                    count += 1
                    name, uid = item["metadata"]["name"], {"uid": item["metadata"]["uid"]}
                    try:
                        await self._client.delete(
                            kind,
                            name,
                            namespace=self.namespace,
                            preconditions=uid,
                            propagationPolicy="Background",
                        )
                    except ApiError as error:  # the operator was faster
                        if error.code not in (404, 409):
                            raise
        return count

    def leftovers(self) -> list[str]:
        """List what there still is of earlier attempts of this job, besides what stays for its logs."""
        foreign = self._of_predecessors()
        return [item for item in super().leftovers() if item not in foreign]

    def remains(self) -> list[str]:
        """List leftovers, and what there still is of deleted resources."""
        return [*self.leftovers(), *sorted(self._of_predecessors())]

    def has_predecessors(self) -> bool:
        """Return whether there are Jobs, Leases or pods of deleted resources."""
        return bool(self._of_predecessors())

    def _of_predecessors(self) -> set[str]:
        own = {item["metadata"]["uid"] for item in self.objects["jobs"].values() if owner_of(item) == self.uid}
        return {
            f"{plural}/{name}"
            for plural, items in self.objects.items()
            for name, item in items.items()
            if owner_of(item) not in (own if plural == "pods" else {self.uid})
            and not (plural == "pods" and item["status"].get("phase") in ("Succeeded", "Failed"))
        }


class RecreatedJobLane(Lane):
    """A lane that counts how jobs that were created again came to rest."""

    def __init__(self, proxy: FaultProxy, cluster: RecreatedCluster, start: Start) -> None:
        super().__init__(proxy, cluster, start)
        self.played = cluster
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.num_deletions = 0

    async def recreate(self, deletions: Sequence[Deletion], *, holds: bool) -> None:
        """Delete and create the job, and wait until it has come to rest.

        Args:
            deletions: all but the first one strike a job that is just about to start.
            holds: the garbage collector comes when the last job has said what it waits for, or is at rest.

        Raises:
            LaneError: the job did not come to rest, or is in a state in which it must not be.
        """
        self.played.is_collecting = not holds
        for deletion in deletions:
            await self._delete(deletion)
        await self._follow(deletions[-1].mode, holds=holds)

    async def _delete(self, deletion: Deletion) -> None:
        is_deleted = asyncio.Event()

        async def act() -> None:
            self.view.note(f"--- {deletion}")
            await self.played.delete_job()
            if not deletion.seconds:
                await self.played.recreate_job(deletion.mode)
            if deletion.kills:
                self.view.kill()
            is_deleted.set()

        self.view.arm(None)
        self.num_deletions += 1
        can_begin = self._rest() == "Running" and not self.played.dead
        self.view.interrupt_at(deletion.number, act)
        before = -1
        if deletion.begin is not None and can_begin:
            before = self.played.status["attempt"]
            await deletion.begin(self.played)

        def is_over() -> bool:
            is_at_rest = bool(self._rest()) and self.played.status["attempt"] > before
            return is_deleted.is_set() or is_at_rest or bool(self._obstacle())

        await self.until("deletion", is_over)
        if self.view.withdraw_interruption():
            await act()
        await is_deleted.wait()
        if deletion.seconds:
            await asyncio.sleep(deletion.seconds)
            await self.played.recreate_job(deletion.mode)

    async def _follow(self, mode: Mode, *, holds: bool) -> None:
        """Wait until the job is at rest and nothing of its predecessors is left; check where it rests."""
        before = {commit.uri for commit in self._all_commits()}
        if holds:
            await self.until("named condition", lambda: bool(self._obstacle() or self._rest()))
            if obstacle := self._obstacle():
                self.outcomes[f"waited: {obstacle}"] += 1
        if self.played.dead:
            await self.played.return_node()
        self.played.is_collecting = True
        collector = asyncio.create_task(self._collect())
        try:
            await self.until("rest", lambda: bool(self._rest()) and not self.played.has_predecessors())
            if (word := _LATER.get(mode)) is not None and self._rest() == "Failed":
                self._count(self._check_rest())
                await self.played.take_over(word)
                await self.until("retry", lambda: self._rest() == "Running")
        finally:
            collector.cancel()
            await asyncio.gather(collector, return_exceptions=True)
        self._count(self._check_rest())
        problems = [*self.played.problems, *(f"{uri} has disappeared" for uri in self.played.volume.missing())]
        lost = before - {commit.uri for commit in self._all_commits()}
        own = {commit.uri for commit in self.played.volume.commits(self._root()) if commit.uid == self.played.uid}
        problems += [f"{uri} of a predecessor was removed" for uri in lost - own]
        if problems:
            raise LaneError("; ".join(problems))

    async def _collect(self) -> None:
        while True:
            await self.played.collect()
            await asyncio.sleep(COLLECT_SECONDS)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def _all_commits(self) -> list[Any]:
        roots = [f"{CHECKPOINT_MOUNT}/{path.name}" for path in self.played.volume.folder.iterdir()]
        return [commit for root in roots for commit in self.played.volume.commits(root)]

    def _root(self) -> str:
        return f"{CHECKPOINT_MOUNT}/{self.played.path}"

    def _obstacle(self) -> str:
        """Return the named condition with which the job waits for its predecessor to go, empty for none."""
        for item in self.played.status.get("conditions", ()):
            if item["type"] == "Launched" and item["reason"] in (NAME_TAKEN, PREDECESSOR_RUNS):
                return str(item["reason"])
            if item["type"] == "Planned" and item["status"] == "False":  # its pods have the accelerators
                return str(item["reason"])
        return ""

    def _rest(self) -> str:
        """Return the phase in which the job is at rest, empty if it is not."""
        status = self.played.status
        if self.played.uid in self.played.dead_owners or self.view.quiet_seconds <= QUIET_SECONDS:
            return "Running" if self.played.problems else ""
        if status.get("phase") == "Failed":
            return "Failed"
        runs = (
            status.get("phase") == "Running"
            and status.get("nodesText", "").startswith(f"{self._num_nodes()}/")
            and status.get("checkpoint", {}).get("attempt") == status["attempt"]
            and not self.played.leftovers()
        )
        return "Running" if runs or self.played.problems else ""

    def _num_nodes(self) -> int:
        return min(NUM_NODES, len(self.played.nodes) - len(self.played.dead))

    def _check_rest(self) -> str:
        """Return how the job came to rest.

        Raises:
            LaneError: it must not be in this state.
        """
        played, status = self.played, self.played.status
        if played.problems:
            raise LaneError("; ".join(played.problems))
        owner, checkpoint = played.volume.owner(self._root()), played.spec["checkpoint"]
        conditions = {item["type"]: item["status"] for item in status["conditions"]}
        found = {key: status.get(key) for key in ("phase", "reason", "message", "startedFrom", "attempt")}
        source = f"{CHECKPOINT_MOUNT}/{checkpoint['startFrom']}" if checkpoint.get("startFrom") else ""
        sources = played.volume.commits(source) if source else []
        if status["phase"] == "Failed":
            if conditions.get("CheckpointOwned") == "False" and owner not in ("", played.uid):
                if not checkpoint.get("takeOver"):
                    return REFUSED
            elif source and not sources and conditions.get("ReshardFailed") == "True":
                return REFUSED_SOURCE
            raise LaneError(f"the job of {checkpoint} failed, although the owner is {owner}: {found}")
        if owner != played.uid:
            raise LaneError(f"the job of {checkpoint} runs, although the owner is {owner}: {found}")
        history = [commit["uri"] for commit in status["checkpoint"]["history"]]
        own = {commit.uri for commit in played.volume.commits(self._root()) if commit.uid == played.uid}
        if not set(history) <= own:
            raise LaneError(f"the status names {history}, of which {sorted(own)} exist")
        if source:
            started: Mapping[str, Any] = status.get("startedFrom") or {}
            if started.get("source") not in {commit.uri for commit in sources}:
                raise LaneError(f"expected a start from one of {sources}: {found}")
            return RESUMED
        if checkpoint.get("takeOver") == TakeOver.RESUME:
            return self._check_resumed(found)
        return TAKEN_OVER if checkpoint.get("takeOver") else FROM_NOTHING

    def _check_resumed(self, found: Mapping[str, Any]) -> str:
        """Check that a job that took its path over goes on from the newest commit of its predecessor there."""
        commits = self.played.volume.commits(self._root())
        others = [commit for commit in commits if commit.uid != self.played.uid]
        source = (found.get("startedFrom") or {}).get("source")
        if source is None and others:
            raise LaneError(f"expected a start from the newest of {others}: {found}")
        if source is not None and source not in {commit.uri for commit in others}:
            raise LaneError(f"expected a start from one of {others}: {found}")
        return RESUMED_IN_PLACE if source else FROM_NOTHING


def draw(chance: random.Random) -> tuple[list[Deletion], bool]:
    """Draw the deletions of one round, and whether the garbage collector is late."""
    begins = (RecreatedCluster.lose_node, RecreatedCluster.crash_pod, RecreatedCluster.request_drain, None)
    deletions = [
        Deletion(
            mode=chance.choice(tuple(Mode)),
            begin=begin,
            number=chance.randrange(1, 110) if begin else 0,
            seconds=chance.choice((0.0, 0.0, 0.0, 0.02, 0.3)),
            kills=chance.random() < 0.25,
        )
        for begin in (chance.choice(begins),)
    ]
    if chance.random() < 0.4:
        again = Deletion(
            mode=chance.choice(tuple(Mode)),
            begin=None,
            number=chance.randrange(1, 60),
            seconds=chance.choice((0.0, 0.0, 0.02, 0.3)),
            kills=chance.random() < 0.25,
        )
        deletions.append(again)
    return deletions, chance.random() < 0.5
