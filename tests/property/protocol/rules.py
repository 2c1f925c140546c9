"""The rules of the protocol, and the states that it has to reach; `docs/protocol.md` says why they hold."""

from __future__ import annotations

from typing import Any

from elastic_operator.api.claim_path import BEGINNING
from elastic_operator.api.status import Status
from elastic_operator.observed.observation import WORKER
from reshard.contract import OWNER_FILE, Env, LeaseKey, TrainerExit
from tests.property.protocol.api_server import Job
from tests.property.protocol.model import MARK, RIVAL_UID, UID, State, System
from tests.property.protocol.search import Step, ViolationError
from tests.property.protocol.trainer import FORMER


class Rules:
    """Checks transitions of a system."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._missing: dict[Any, str] = {}

    def check(self, before: Any, step: Step) -> None:
        """Check a transition.

        Raises:
            ViolationError: it breaks a rule.
        """
        after: State = step.after  # type: ignore[assignment]
        if (after.status, after.storage, after.processes, after.reader) != (
            before.status, before.storage, before.processes, before.reader,
        ):  # fmt: skip
            self._check_references(after)
        if after.status != before.status:
            self._check_status(self._system.status(before), self._system.status(after))
        if after.objects != before.objects:
            self._check_objects(before, after)
        if after.processes != before.processes:
            self._check_exits(before, after)
        if after.storage != before.storage:
            self._check_publication(before, after)
        if self._system.scenario.takes_over:
            self._check_take_over(before, after)

    def _check_references(self, state: State) -> None:
        """Every commit that anything refers to is there."""
        key = (state.status, state.storage, state.reader, state.processes)
        if key not in self._missing:
            self._missing[key] = self._find_missing(state)
        if self._missing[key]:
            raise ViolationError(self._missing[key])

    def _find_missing(self, state: State) -> str:
        status, commits = self._system.status(state), self._system.root.commits(state.storage)
        references = {item.uri: "status.checkpoint" for item in status.checkpoint.history if not item.invalid}
        current = status.current
        if current is not None and current.resume.uri and (current.resume.ready or not current.resume.external):
            references[current.resume.uri if current.resume.ready else current.resume.source] = "the planned attempt"
        for process in self._system.processes(state):
            if status.launched and process.attempt == status.attempt and not process.memory.is_restored:
                references[self._system.trainers.resume_of(process)] = (
                    f"attempt {process.attempt}, which has not restored it yet"
                )
        references[state.reader] = "the other job"
        missing = {uri: who for uri, who in references.items() if uri and uri not in commits}
        return "; ".join(f"{uri} is gone, and {who} refers to it" for uri, who in missing.items())

    def _check_status(self, before: Status, after: Status) -> None:
        if after.attempt < before.attempt:
            raise ViolationError(f"status.attempt goes back from {before.attempt} to {after.attempt}")
        newest = next((item for item in after.checkpoint.history if item.uri == before.checkpoint.uri), None)
        if after.checkpoint.step < before.checkpoint.step and not (newest is not None and newest.invalid):
            raise ViolationError(
                f"the newest commit goes back from step {before.checkpoint.step} to {after.checkpoint.step}"
            )
        if after.pinned is not None and after.pinned != after.checkpoint.topology:
            raise ViolationError(f"{after.pinned} is pinned, the newest commit has {after.checkpoint.topology}")
        known = {item.uri for item in before.checkpoint.history}
        for item in after.checkpoint.history:
            if item.uri not in known and item.attempt != before.attempt:
                raise ViolationError(f"{item.uri} is recorded while attempt {before.attempt} is the current one")

    def _check_objects(self, before: State, after: State) -> None:
        old, new = self._system.objects(before), self._system.objects(after)
        for attempt, notes in new.leases:
            commit = dict(notes).get(LeaseKey.COMMIT)
            newer = [job.attempt for job in new.jobs if job.role == WORKER and job.attempt > attempt]
            if newer and commit != dict(dict(old.leases).get(attempt, ())).get(LeaseKey.COMMIT):
                raise ViolationError(
                    f"a commit of attempt {attempt} is acknowledged after attempt {newer[0]} was launched"
                )
        for job in new.jobs:
            if job.role == WORKER and old.job(job.attempt, WORKER) is None:
                self._check_launch(after, job)

    def _check_launch(self, state: State, job: Job) -> None:
        objects, status = self._system.objects(state), self._system.status(state)
        for attempt, _ in objects.leases:
            if attempt < job.attempt and attempt in objects.rights:
                raise ViolationError(f"attempt {job.attempt} is launched while attempt {attempt} may use its Lease")
        # A node may come back between the decision and the launch. Its pod is deleted then, and its Lease refused.
        may_return = "return" in self._system.scenario.kinds
        for process in self._system.processes(state):
            pod = objects.pod(process.attempt)
            may_run = pod is not None and pod.node not in state.lost and not (may_return and pod.is_deleted)
            if process.exit_code is None and may_run:
                raise ViolationError(f"attempt {job.attempt} is launched while attempt {process.attempt} runs")
        container = self._system.server.container(job)
        resume = next(item["value"] for item in container["env"] if item["name"] == Env.RESUME)
        newest, ever = status.checkpoint.step, (*status.checkpoint.history, *status.checkpoint.released)
        if not resume and ever and state.word != BEGINNING:
            raise ViolationError(f"attempt {job.attempt} begins from nothing after a commit was acknowledged")
        if (self._system.root.step(state.storage, resume) if resume else 0) != newest:
            raise ViolationError(
                f"attempt {job.attempt} resumes from {resume or 'nothing'}, the newest step is {newest}"
            )

    def _check_exits(self, before: State, after: State) -> None:
        status = self._system.status(after)
        old = {process.attempt: process.exit_code for process in self._system.processes(before)}
        for process in self._system.processes(after):
            if process.exit_code is None or old.get(process.attempt, process.exit_code) is not None:
                continue
            is_current = status.launched and process.attempt == status.attempt and not self._has_rival(after)
            if is_current and process.exit_code in (TrainerExit.RESUME_INVALID, TrainerExit.NOT_OWNER):
                raise ViolationError(f"attempt {process.attempt} is current, and exits with code {process.exit_code}")

    def _check_publication(self, before: State, after: State) -> None:
        """A trainer publishes a save only after its Lease has answered in the same call."""
        new = self._system.root.commits(after.storage) - self._system.root.commits(before.storage)
        for process in self._system.processes(before):
            is_publishing = any(self._is_by(process.attempt, uri) for uri in new)
            if is_publishing and not self._system.trainers.has_answer(process):
                raise ViolationError(f"attempt {process.attempt} publishes a commit, and its Lease has not answered")
            if is_publishing and self._system.scenario.takes_over and not self._system.trainers.has_claim(process):
                raise ViolationError(f"attempt {process.attempt} publishes a commit, and has not checked the owner")

    def _is_by(self, attempt: int, uri: str) -> bool:
        """Return whether a commit is one of an attempt, or with FORMER of the former owner."""
        is_former = self._system.scenario.takes_over and not uri.endswith(MARK)
        return is_former if attempt == FORMER else not is_former and f"/a{attempt}/" in uri

    def _has_rival(self, state: State) -> bool:
        return self._system.root.document(state.storage, OWNER_FILE).get("uid") == RIVAL_UID

    def _check_take_over(self, before: State, after: State) -> None:
        """Nothing of the former owner is lost or recorded, and the job goes on from its newest commit."""
        root, name = self._system.root, f"TAKEOVER-{UID}.json"
        old, new = (sorted(filter(self._is_former, root.commits(item.storage))) for item in (before, after))
        if not set(old) <= set(new):
            raise ViolationError(f"a commit of the former owner is gone: {set(old) - set(new)}")
        if root.document(after.storage, name) and not root.document(before.storage, name):
            newest = max(old, key=lambda uri: root.step(before.storage, uri)).removeprefix(f"{root.folder}/")
            chosen = root.document(after.storage, name)["commit"]
            if chosen != newest:
                raise ViolationError(f"the job goes on from {chosen or 'nothing'}, the newest commit is {newest}")
        choice = root.document(after.storage, name).get("commit")
        status, launched = self._system.status(after), self._system.objects(after).jobs
        if foreign := [item.uri for item in status.checkpoint.history if self._is_former(item.uri)]:
            raise ViolationError(f"the status names commits of the former owner: {foreign}")
        if any(job.role == WORKER for job in launched):
            least = root.step(after.storage, f"{root.folder}/{choice}") if choice else 1
            if status.checkpoint.step < least:
                raise ViolationError(f"an attempt is launched, and the job has lost the commit {choice}")

    def _is_former(self, uri: str) -> bool:
        return self._is_by(FORMER, uri)

    def is_good(self, state: Any) -> bool:
        """Return whether the current attempt trains, and its newest commit is acknowledged in the status."""
        status = self._system.status(state)
        if self._has_rival(state) and status.reason == "CheckpointNotOwned":
            return True
        if state.work or status.current is None or state.cut or state.drain != status.drain_request:
            return False
        process = next((item for item in self._system.processes(state) if item.attempt == status.attempt), None)
        if process is None or process.exit_code is not None or process.call:
            return False
        mark = MARK if self._system.scenario.takes_over else ""
        newest = f"{self._system.root.folder}/a{status.attempt}/step-{process.memory.step:08d}{mark}"
        return process.memory.num_saves >= self._system.scenario.num_saves and status.checkpoint.uri == newest
