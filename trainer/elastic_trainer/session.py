"""The session: what a training script calls.

session = Session.from_env()
...                                            # torch.distributed.init_process_group, model, optimizer
session.start()
position = session.restore(load)               # load(folder) is the framework's own loading
for step in range(position.step, num_steps):
    ...                                        # one optimizer step
    action = session.after_step(step=step + 1, samples=..., loss=...)
    if action.save:
        session.save(write)                    # write(folder, tag) is the framework's own saving
    if action.stop:
        break
session.finish()
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from elastic_trainer import retention, settings, virtual
from elastic_trainer.batch import BatchPlan
from elastic_trainer.collective import Collective
from elastic_trainer.heartbeat import Heartbeat
from elastic_trainer.lease import LeaseMailbox
from elastic_trainer.mailbox import FileMailbox, Mailbox, NoMailbox
from reshard.commit import (
    VIRTUAL,
    Commit,
    CommittedFile,
    check_files,
    file_crc32,
    read_commit,
    sync_folder,
    write_commit,
)
from reshard.contract import LeaseKey, Request, TrainerExit, TrainerPhase
from reshard.errors import ReshardError
from reshard.topology import Topology

_log = logging.getLogger(__name__)
_SAVE, _STOP = 1, 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training is.

    Attributes:
        step: optimizer steps done.
        samples: global samples consumed.
        data: what the writer of the commit said about its data (seed and the like); empty at a first start.
    """

    step: int = 0
    samples: int = 0
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What all ranks have agreed to do at this step boundary."""

    save: bool
    stop: bool


class Session:
    """One training process' part in its attempt.

    Args:
        settings_: what the environment says.
        mailbox: how rank 0 talks with the operator.
        keep: newest commits that are kept.
    """

    def __init__(self, settings_: settings.Settings, mailbox: Mailbox, *, keep: int = 3) -> None:
        self.settings = settings_
        self.keep = keep
        self.position = Position()
        self._collective = Collective(rank=settings_.rank, world_size=settings_.topology.world_size)
        self._heartbeat: Heartbeat | None = None
        if self.is_leader:
            self._heartbeat = Heartbeat(
                mailbox, every_seconds=settings_.heartbeat_seconds, on_fenced=_stop_fenced_process
            )
        self._last_commit_monotonic = time.monotonic()
        self._draining = False

    @classmethod
    def from_env(cls, *, keep: int = 3) -> Session:
        """Read the environment and choose the mailbox: the attempt's Lease, a file, or none.

        Raises:
            ConfigurationError: see `settings.from_env`.
        """
        found = settings.from_env()
        mailbox: Mailbox = NoMailbox()
        if found.rank == 0 and found.mailbox is not None:
            mailbox = FileMailbox(found.mailbox)
        elif found.rank == 0 and found.lease:
            mailbox = LeaseMailbox(
                namespace=found.namespace, name=found.lease, holder=os.uname().nodename, server=found.api_server
            )
        return cls(found, mailbox, keep=keep)

    @property
    def topology(self) -> Topology:
        """Degrees of parallelism of this attempt."""
        return self.settings.topology

    @property
    def is_leader(self) -> bool:
        """This process is rank 0: it talks with the operator and publishes commits."""
        return self.settings.rank == 0

    def batch_plan(self, *, global_batch: int = 0, micro_batch: int = 0) -> BatchPlan:
        """The batch arithmetic of this attempt; the operator's values win over the script's defaults.

        Raises:
            ConfigurationError: the global batch cannot be divided.
        """
        return BatchPlan(
            global_batch=self.settings.global_batch or global_batch,
            micro_batch=self.settings.micro_batch or micro_batch,
            dp=self.topology.num_replicas,
        )

    def start(self) -> None:
        """Connect the ranks and begin the heartbeat. Call after torch.distributed is initialised."""
        if self._heartbeat is not None:
            self._heartbeat.update({LeaseKey.PHASE: TrainerPhase.STARTING})
            self._heartbeat.start()
        self._collective.connect()

    def restore(self, load: Callable[[Path], None]) -> Position:
        """Check the commit that the operator chose, let `load` read it, and return where training goes on.

        Every rank checks its share of the files (size and CRC-32) and all agree before anything is loaded. A commit
        that cannot be used ends the process with exit code 76, after telling the operator why: it will choose an
        earlier one.
        """
        folder = self.settings.resume
        self._tell({LeaseKey.LOADER: virtual.loader(self.settings.scratch).to_json()})
        if folder is None:
            return self.position
        self._tell({LeaseKey.PHASE: TrainerPhase.RESTORING})
        problem, commit = self._check(folder)
        problems = [text for text in self._collective.gather(problem) if text]
        if problems or commit is None:
            self._refuse_resume(folder, problems)
        if commit.format == VIRTUAL:
            self._load_virtual(folder, load)
        else:
            load(folder)
        self.position = Position(step=commit.step, samples=commit.samples, data=commit.data)
        self._last_commit_monotonic = time.monotonic()
        _log.info("restored step %d (%d samples) from %s", commit.step, commit.samples, folder)
        return self.position

    def _load_virtual(self, folder: Path, load: Callable[[Path], None]) -> None:
        """Load through a manifest; all ranks agree that what they read together is undamaged before anything is."""
        first = self.settings.rank - self.settings.local_rank
        ranks = range(first, min(first + self.settings.local_world_size, self._collective.world_size))
        with contextlib.ExitStack() as stack:
            made: virtual.Opened | None = None
            problem = ""
            try:
                made = stack.enter_context(virtual.opened(folder, ranks=ranks, scratch=self.settings.scratch))
            except (ReshardError, OSError) as error:
                problem = str(error)
            read = made.loaded.ranges if made is not None and made.loaded is not None else {}
            gathered = self._collective.gather((problem, read))
            problems = [text for text, _ in gathered if text]
            if self.is_leader and made is not None and not problems:
                problems = virtual.damage(made.manifest, [ranges for _, ranges in gathered])
            problems = sorted({text for found in self._collective.gather(problems) for text in found})
            if problems or made is None:
                stack.close()
                self._refuse_resume(folder, problems)
            load(made.folder)
            self._collective.gather(None)  # no process removes files that another one has yet to read

    def after_step(self, *, step: int, samples: int, loss: float) -> Action:
        """Report a finished optimizer step; all ranks return the same action."""
        first = self.position.step == step - 1 and not self._reported_first
        self.position = dataclasses.replace(self.position, step=step, samples=samples)
        now = _now()
        annotations = {
            LeaseKey.PHASE: TrainerPhase.DRAINING if self._draining else TrainerPhase.TRAINING,
            LeaseKey.STEP: str(step),
            LeaseKey.SAMPLES: str(samples),
            LeaseKey.LOSS: f"{loss:.6g}",
            LeaseKey.STEP_TIME: now,
        }
        if first:
            annotations[LeaseKey.FIRST_STEP_TIME] = now
            self._reported_first = True
        self._tell(annotations, now=first)
        decision = self._collective.broadcast(self._decide() if self.is_leader else 0)
        self._draining = bool(decision & _STOP)
        return Action(save=bool(decision & _SAVE), stop=bool(decision & _STOP))

    _reported_first = False

    def _decide(self) -> int:
        assert self._heartbeat is not None
        if self._heartbeat.request == Request.DRAIN:
            return _SAVE | _STOP
        interval = self.settings.checkpoint_interval_seconds
        return _SAVE if interval and time.monotonic() - self._last_commit_monotonic >= interval else 0

    def save(
        self,
        write: Callable[[Path, str], None],
        *,
        format_: str = "deepspeed",
        data: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint of the current position and publish it as a commit.

        Args:
            write: saves with the framework's own means: called on every rank with the attempt's folder and a tag; its
                files must lie in `folder / tag` afterwards.
            format_: name of the format, as `reshard` knows it.
            data: position in the data beyond the number of samples (seed).
            model: what a resharder needs and the files do not say (pipeline layers, partition method).

        Returns:
            The commit's folder.
        """
        self._tell({LeaseKey.PHASE: TrainerPhase.SAVING})
        attempt_folder = self.settings.checkpoint_root / f"a{self.settings.attempt}"
        tag = f"step-{self.position.step:08d}"
        folder = attempt_folder / tag
        if self.is_leader:
            attempt_folder.mkdir(parents=True, exist_ok=True)
            if folder.exists():  # a save of this attempt that never became a commit
                shutil.rmtree(folder)
        self._collective.broadcast(0)
        write(attempt_folder, tag)
        self._collective.gather(None)
        files = self._describe(folder)
        if self.is_leader:
            self._publish(folder, files, format_=format_, data=data or {}, model=model or {})
        self._collective.broadcast(0)
        self._last_commit_monotonic = time.monotonic()
        return folder

    def finish(self) -> None:
        """Say how it ended. After a drain the process exits with code 75."""
        phase = TrainerPhase.DRAINED if self._draining else TrainerPhase.COMPLETE
        if self._heartbeat is not None:
            self._heartbeat.update({LeaseKey.PHASE: phase})
            self._heartbeat.stop()
        self._collective.gather(None)
        self._collective.close()
        if self._draining:
            sys.exit(TrainerExit.DRAINED)

    def _describe(self, folder: Path) -> list[CommittedFile]:
        """Size and CRC-32 of every file, each rank its share; every file is on stable storage afterwards."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        own = []
        for path in paths[self.settings.rank :: self._collective.world_size]:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
            relative = path.relative_to(folder).as_posix()
            own.append(CommittedFile(path=relative, num_bytes=path.stat().st_size, crc32=file_crc32(path)))
        gathered = self._collective.gather(own)
        return sorted((file for files in gathered for file in files), key=lambda file: file.path)

    def _publish(
        self,
        folder: Path,
        files: list[CommittedFile],
        *,
        format_: str,
        data: Mapping[str, Any],
        model: Mapping[str, Any],
    ) -> None:
        commit = Commit(
            format=format_,
            step=self.position.step,
            samples=self.position.samples,
            topology=self.topology,
            attempt=self.settings.attempt,
            writer="trainer",
            files=files,
            data=data,
            model=model,
            created=_now(),
        )
        sync_folder(folder)
        write_commit(folder, commit)
        sync_folder(folder.parent)
        assert self._heartbeat is not None
        self._heartbeat.update({LeaseKey.COMMIT: commit.ref(folder).to_json()})
        self._heartbeat.flush()
        resume = self.settings.resume
        retention.prune(
            self.settings.checkpoint_root,
            attempt=self.settings.attempt,
            keep=self.keep,
            protected={resume} if resume else set(),
        )

    def _check(self, folder: Path) -> tuple[str, Commit | None]:
        """This rank's verdict on its share of the commit."""
        try:
            commit = read_commit(folder)
        except ReshardError as error:
            return str(error), None
        if commit.topology != self.topology:
            return f"it is laid out for {commit.topology}, this attempt runs at {self.topology}: reshard it", None
        share = dataclasses.replace(commit, files=commit.files[self.settings.rank :: self._collective.world_size])
        try:
            check_files(folder, share, crc=True)
        except (ReshardError, OSError) as error:
            return "; ".join(getattr(error, "problems", ())) or str(error), None
        return "", commit

    def _refuse_resume(self, folder: Path, problems: list[str]) -> NoReturn:
        text = f"{folder}: {'; '.join(sorted(set(problems)))}"
        _log.error("cannot resume: %s", text)
        if self._heartbeat is not None:
            self._heartbeat.update({LeaseKey.RESUME_ERROR: text[:1000]})
            self._heartbeat.stop()
        self._collective.gather(None)
        sys.exit(TrainerExit.RESUME_INVALID)

    def _tell(self, annotations: dict[LeaseKey, str], *, now: bool = False) -> None:
        if self._heartbeat is not None:
            self._heartbeat.update(annotations, now=now)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _stop_fenced_process(reason: str) -> None:
    """End at once: a newer attempt owns the job, and the training threads may hang in a collective for ever."""
    sys.stderr.write(f"elastic_trainer: this attempt has been superseded ({reason}); stopping\n")
    sys.stderr.flush()
    os._exit(1)
