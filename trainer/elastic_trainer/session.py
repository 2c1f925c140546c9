"""The session: the interface that a training script calls.

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
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from elastic_trainer import settings, virtual
from elastic_trainer.batch import BatchPlan
from elastic_trainer.collective import Collective
from elastic_trainer.file_shares import Finding, Verdict, check_commit, is_refused, judge
from elastic_trainer.heartbeat import Heartbeat
from elastic_trainer.lease import LeaseMailbox
from elastic_trainer.mailbox import FileMailbox, Mailbox, NoMailbox
from elastic_trainer.publisher import Publisher, commit_name
from elastic_trainer.saving import futures
from elastic_trainer.saving.asynchronous import AsynchronousSaves
from elastic_trainer.termination import Termination
from reshard.commits.commit import VIRTUAL, Commit, CommittedFile
from reshard.contract import LeaseKey, Request, TrainerExit, TrainerPhase
from reshard.errors import NotOwnerError, ReshardError, StoreError
from reshard.storage.durable import file_crc32
from reshard.topology import Topology

_log = logging.getLogger(__name__)
_SAVE, _STOP = 1, 2
_NOT_OWNER, _FAILED = -1, -2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The progress of the training.

    Attributes:
        step: optimizer steps done.
        samples: global samples consumed.
        data: the `data` with which the commit was saved (seed and the like); empty at a first start.
    """

    step: int = 0
    samples: int = 0
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Decision after a step, the same on all ranks.

    Attributes:
        save: save a checkpoint now.
        stop: end the training loop.
    """

    save: bool
    stop: bool


class Session:
    """The interface of one training process to its attempt.

    Args:
        settings_: settings from the environment.
        mailbox: mailbox between rank 0 and the operator; other ranks only read it, at SIGTERM.
        keep: number of newest commits that are never removed. In a cluster the operator may keep more.

    >>> session = Session.from_env()
    >>> session.start()
    >>> position = session.restore(lambda folder: print("load", folder))
    >>> action = session.after_step(step=position.step + 1, samples=8, loss=0.5)
    >>> print(session.save(lambda folder, tag: (folder / tag).mkdir(parents=True)))
    checkpoints/a1/step-00000001
    >>> session.finish()
    """

    def __init__(self, settings_: settings.Settings, mailbox: Mailbox, *, keep: int = 3) -> None:
        self.settings = settings_
        self.position = Position()
        self._collective = Collective(rank=settings_.rank, world_size=settings_.topology.world_size)
        self._termination = Termination(mailbox, announce=self._collective.announce_leaving)
        self._heartbeat: Heartbeat | None = None
        self._publisher: Publisher | None = None
        if self.is_leader:
            self._heartbeat = Heartbeat(
                mailbox, every_seconds=settings_.heartbeat_seconds, on_fenced=_stop_fenced_process
            )
            self._publisher = Publisher(settings_, self._heartbeat, keep=keep)
        publish = self._publisher.publish if self._publisher is not None else None
        self._saves = AsynchronousSaves(settings_, self._collective, publish)
        self._last_commit_monotonic = time.monotonic()
        self._draining = False

    @classmethod
    def from_env(
        cls, *, keep: int = 3, tp: int = 1, zero: int | None = None, asynchronous: bool | None = None
    ) -> Session:
        """Read the environment and choose the mailbox: the attempt's Lease, a file, or none.

        Args:
            keep: see `Session`.
            tp: the script's own tensor parallel degree, used if the environment says no topology.
            zero: the script's own ZeRO stage, used if the environment says no topology.
            asynchronous: save asynchronously; None for what ETJ_ASYNC_SAVES says.

        Raises:
            ConfigurationError: see `settings.from_env`.
        """
        settings_ = settings.from_env()
        if not settings_.has_topology:
            settings_ = settings.with_degrees(settings_, tp=tp, zero=zero)
        if asynchronous is not None:
            settings_ = dataclasses.replace(settings_, async_saves=asynchronous)
        mailbox: Mailbox = NoMailbox()
        if settings_.mailbox is not None:
            mailbox = FileMailbox(settings_.mailbox)
        elif settings_.lease:
            mailbox = LeaseMailbox(
                namespace=settings_.namespace,
                name=settings_.lease,
                holder=os.uname().nodename,
                server=settings_.api_server,
                owner_uid=settings_.job_uid,
            )
        return cls(settings_, mailbox, keep=keep)

    @property
    def topology(self) -> Topology:
        """Degrees of parallelism of this attempt."""
        return self.settings.topology

    @property
    def is_leader(self) -> bool:
        """True if this process is rank 0, which talks to the operator and publishes commits."""
        return self.settings.rank == 0

    def batch_plan(self, *, global_batch: int = 0, micro_batch: int = 0) -> BatchPlan:
        """Return the batch plan of this attempt.

        Args:
            global_batch: used if the operator sets no global batch.
            micro_batch: used if the operator sets no micro batch.

        Raises:
            ConfigurationError: the global batch is not a multiple of the micro batch and the replicas.
        """
        return BatchPlan(
            global_batch=self.settings.global_batch or global_batch,
            micro_batch=self.settings.micro_batch or micro_batch,
            dp=self.topology.num_replicas,
        )

    def start(self) -> None:
        """Connect the ranks, start the heartbeat and claim the checkpoint root for the job.

        Call it after torch.distributed is initialised. If the root belongs to another job, all ranks exit with code 77,
        after rank 0 has told the operator why; nothing is written below the root.
        """
        if self._heartbeat is not None:
            self._heartbeat.update({LeaseKey.PHASE: TrainerPhase.STARTING})
            self._heartbeat.start()
        self._collective.connect()
        self._termination.install()
        self._only_as_owner(self._claim)
        self._saves.connect()

    def restore(self, load: Callable[[Path], None], *, virtual_commits: bool = True) -> Position:
        """Check the commit that the operator chose, load it, and return the position from which training goes on.

        Every rank checks its share of the files (size and CRC-32), and no rank loads anything before all checks have
        passed. If the commit cannot be used, all ranks exit with code 76, after rank 0 has told the operator why; the
        operator then chooses an earlier commit. If the storage cannot be read now, all ranks fail, and the next attempt
        tries the same commit.

        A commit of another topology is accepted if its format is `dcp`, because torch.distributed.checkpoint loads it
        at any degrees; any other commit must be converted to the topology of this attempt first.

        Args:
            load: loads the folder with the framework's own function.
            virtual_commits: `load` reads the folder within this call, so that a virtual commit can be offered to it.

        Raises:
            StoreError: the storage cannot be read now.
        """
        folder = self.settings.resume
        loader = virtual.describe_loader(self.settings.scratch)
        if not virtual_commits:
            loader = dataclasses.replace(loader, manifests=())
        self._tell({LeaseKey.LOADER: loader.to_json()})
        if folder is None:
            return self.position
        self._tell({LeaseKey.PHASE: TrainerPhase.RESTORING})
        finding, commit = check_commit(folder, rank=self.settings.rank, topology=self.topology)
        if commit is not None and commit.format == VIRTUAL and not virtual_commits:
            text = "it is virtual, and this script cannot load that: reshard it in mode Materialize"
            finding = Finding(Verdict.UNUSABLE, text)
        findings = self._collective.gather(finding)
        if commit is None or any(finding.text for finding in findings):
            self._end_restore(folder, findings)
        if commit.format == VIRTUAL:
            self._load_virtual(folder, load)
        else:
            load(folder)
            self._saves.expect(commit.num_bytes)
        self.position = Position(step=commit.step, samples=commit.samples, data=commit.data)
        self._last_commit_monotonic = time.monotonic()
        _log.info("restored step %d (%d samples) from %s", commit.step, commit.samples, folder)
        return self.position

    def _load_virtual(self, folder: Path, load: Callable[[Path], None]) -> None:
        """Load a virtual commit, after all ranks have checked that the bytes they read together are undamaged."""
        first = self.settings.rank - self.settings.local_rank
        ranks = range(first, min(first + self.settings.local_world_size, self._collective.world_size))
        with contextlib.ExitStack() as stack:
            opened: virtual.OpenVirtualCommit | None = None
            finding = Finding()
            try:
                opened = stack.enter_context(
                    virtual.open_virtual_commit(folder, ranks=ranks, scratch=self.settings.scratch)
                )
            except ReshardError as error:
                finding = dataclasses.replace(judge(error, folder), text=str(error))  # names the source
            except OSError as error:  # of the scratch folder
                finding = Finding(Verdict.UNUSABLE, str(error))
            read = opened.loaded.ranges if opened is not None and opened.loaded is not None else {}
            gathered = self._collective.gather((finding, read))
            findings = [finding for finding, _ in gathered]
            if self.is_leader and opened is not None and not any(finding.text for finding in findings):
                damage = virtual.find_damage(opened.manifest, [ranges for _, ranges in gathered])
                findings += [Finding(Verdict.UNUSABLE, text) for text in damage]
            findings = self._collective.gather(findings)[0]  # rank 0 knows the damage, too
            if opened is None or any(finding.text for finding in findings):
                stack.close()
                self._end_restore(folder, findings)
            load(opened.folder)
            self._collective.gather(None)  # no process may remove files that another one still reads

    def after_step(self, *, step: int, samples: int, loss: float | None) -> Action:
        """Report a finished optimizer step; all ranks return the same action. The loss may not be known every step."""
        is_first = self.position.step == step - 1 and not self._reported_first
        self.position = dataclasses.replace(self.position, step=step, samples=samples)
        now = _now()
        annotations = {
            LeaseKey.PHASE: TrainerPhase.DRAINING if self._draining else TrainerPhase.TRAINING,
            LeaseKey.STEP: str(step),
            LeaseKey.SAMPLES: str(samples),
            LeaseKey.STEP_TIME: now,
        }
        if loss is not None:
            annotations[LeaseKey.LOSS] = f"{loss:.6g}"
        if is_first:
            annotations[LeaseKey.FIRST_STEP_TIME] = now
            self._reported_first = True
        self._tell(annotations, now=is_first)
        self._termination.expect_commit()
        self._saves.check()
        decision = self._only_as_owner(self._decide)
        self._draining = bool(decision & _STOP)
        return Action(save=bool(decision & _SAVE), stop=bool(decision & _STOP))

    _reported_first = False

    def _decide(self) -> int:
        assert self._heartbeat is not None
        assert self._publisher is not None
        is_busy = self._saves.is_busy
        if not is_busy:  # otherwise a thread uses the publisher
            self._publisher.confirm_when_answered()
        is_leaving = self._termination.is_requested or self._collective.is_anyone_leaving()
        if self._heartbeat.request == Request.DRAIN or is_leaving:
            return _SAVE | _STOP
        if is_busy:
            return 0
        if self._saves.has_failed():
            return _SAVE
        interval = self.settings.checkpoint_interval_seconds
        return _SAVE if interval and time.monotonic() - self._last_commit_monotonic >= interval else 0

    def save(
        self,
        write: Callable[[Path, str], object],
        *,
        format_: str = "deepspeed",
        data: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint of the current position and publish it as a commit.

        Args:
            write: saves with the framework's own function. It is called on every rank with the attempt's folder and a
                tag, and must write its files to `folder / tag`.
            format_: name of the format in `reshard`: `deepspeed`, or `dcp` for torch.distributed.checkpoint.
            data: position in the data beyond the number of samples (seed).
            model: properties of the model that a resharder needs and the files do not contain (pipeline layers,
                partition method).

        A committed folder never changes: a second save of the same step gets a folder of its own (`step-<N>.2`).
        While rank 0 cannot reach the attempt's Lease, the save is complete but not published, and no other process
        reads it. It is published, without being written again, as soon as the Lease answers.

        If saves are asynchronous, `write` gets a folder on this node, and the commit is published in the background. A
        future that `write` returns is awaited.

        Returns:
            The commit's folder, in which an asynchronous save may not be complete yet.
        """
        self._tell({LeaseKey.PHASE: TrainerPhase.SAVING})
        started = time.monotonic()
        attempt_folder = self.settings.checkpoint_root / f"a{self.settings.attempt}"
        self._saves.wait()
        waited = time.monotonic() - started
        obstacle = self._saves.find_obstacle(self._only_as_owner(lambda: int(self._saves.has_failed())))
        if self._draining:
            obstacle = obstacle or "the training stops"
        number = self._only_as_owner(self._free_number)
        folder = attempt_folder / commit_name(self.position.step, number, self.settings.job_uid)
        commit = self._commit([], format_=format_, data=data or {}, model=model or {})
        if obstacle:
            futures.wait(write(attempt_folder, folder.name))
            self._collective.gather(None)
            commit = dataclasses.replace(commit, files=self._describe(folder))
            self._only_as_owner(lambda: self._publish(folder, commit))
            self._saves.expect(commit.num_bytes)
        else:
            self._saves.begin(write, folder, commit)
        self._last_commit_monotonic = time.monotonic()
        if self.settings.async_saves:
            self._tell_save(obstacle, waited=waited, seconds=self._last_commit_monotonic - started)
        return folder

    def _tell_save(self, obstacle: str, *, waited: float, seconds: float) -> None:
        """Tell the log and the operator how a save went in a training that saves asynchronously."""
        how = f"synchronous, because {obstacle}" if obstacle else "asynchronous"
        text = f"step {self.position.step}: {how}; waited {seconds:.2f} s, {waited:.2f} s of it for the save before"
        self._tell({LeaseKey.SAVE: text[:1000]})
        if self.is_leader:
            _log.info("save of %s", text)

    def finish(self) -> None:
        """Report the end of the training to the operator. After a drain the process exits with code 75.

        If the last save could not be published, because the Lease did not answer for a minute or an asynchronous save
        failed, the process exits with code 78. The next attempt then resumes from the last published commit and repeats
        the steps since then.
        """
        phase = TrainerPhase.DRAINED if self._draining else TrainerPhase.COMPLETE
        self._saves.wait()
        is_published = self._only_as_owner(self._confirm_last)
        if self._heartbeat is not None:
            if is_published:
                self._heartbeat.update({LeaseKey.PHASE: phase})
            self._heartbeat.stop()
        self._close()
        if not is_published:
            sys.exit(TrainerExit.UNPUBLISHED)
        if self._draining:
            sys.exit(TrainerExit.DRAINED)

    def _describe(self, folder: Path) -> list[CommittedFile]:
        """Flush all files to stable storage, and return their sizes and CRC-32; each rank handles its share.

        Symbolic links are left out: what they lead to may change, and every reader of commits refuses them.
        """
        entries = sorted(folder.rglob("*"))
        links = [path for path in entries if path.is_symlink()]
        if links and self.settings.rank == 0:
            _log.warning("%s: is a symbolic link and no part of the commit (%d in all)", links[0], len(links))
        paths = [path for path in entries if path.is_file() and not path.is_symlink()]
        own = []
        for path in paths[self.settings.rank :: self._collective.world_size]:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
            relative = path.relative_to(folder).as_posix()
            own.append(CommittedFile(path=relative, num_bytes=path.stat().st_size, crc32=file_crc32(path)))
        gathered = self._collective.gather(own)
        return sorted((file for files in gathered for file in files), key=lambda file: file.path)

    def _commit(
        self, files: list[CommittedFile], *, format_: str, data: Mapping[str, Any], model: Mapping[str, Any]
    ) -> Commit:
        return Commit(
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
            owner=self.settings.job_uid,
        )

    def _claim(self) -> int:
        assert self._publisher is not None
        self._publisher.claim()
        self._publisher.announce()
        return 0

    def _free_number(self) -> int:
        assert self._publisher is not None
        return self._publisher.free_number(self.position.step)

    def _publish(self, folder: Path, commit: Commit) -> int:
        assert self._publisher is not None
        self._publisher.publish(folder, commit)
        return 0

    def _confirm_last(self) -> int:
        assert self._publisher is not None
        return int(self._publisher.confirm_last() and not self._saves.has_failed())

    def _only_as_owner(self, act: Callable[[], int]) -> int:
        """Call `act`, which only the owner of the checkpoint root may do, on rank 0; return its result on every rank.

        If the root belongs to another job, every rank exits with code 77. If rank 0 fails otherwise, every rank fails.
        """
        result, failure = 0, None
        if self.is_leader:
            try:
                result = act()
            except NotOwnerError as error:
                result = _NOT_OWNER
                self._tell_not_owner(error)
            except (ReshardError, OSError) as error:
                result, failure = _FAILED, error
        result = self._collective.broadcast(result)
        if result == _FAILED:
            raise failure or StoreError("rank 0 cannot use the checkpoint root: its output says why")
        if result == _NOT_OWNER:
            self._close()
            sys.exit(TrainerExit.NOT_OWNER)
        return result

    def _close(self) -> None:
        """Wait for all ranks, and end this rank's threads; the process keeps its exit code only without them."""
        self._collective.gather(None)
        self._saves.close()
        self._termination.close()
        self._collective.close()

    def _tell_not_owner(self, error: NotOwnerError) -> None:
        assert self._heartbeat is not None
        _log.error("cannot use the checkpoint root: %s", error)
        self._heartbeat.update({LeaseKey.OWNER_ERROR: str(error)[:1000]})
        self._heartbeat.stop()

    def _end_restore(self, folder: Path, findings: list[Finding]) -> NoReturn:
        """End all ranks: with code 76 if the commit is refused, else so that the next attempt tries it again."""
        text = f"{folder}: {'; '.join(sorted({finding.text for finding in findings if finding.text}))}"
        refused = is_refused(findings)
        _log.error("cannot resume%s: %s", "" if refused else " now", text)
        if self._heartbeat is not None:
            if refused:
                self._heartbeat.update({LeaseKey.RESUME_ERROR: text[:1000]})
            self._heartbeat.stop()
        self._close()
        if not refused:
            raise StoreError(f"the commit to resume from cannot be read now: {text}")
        sys.exit(TrainerExit.RESUME_INVALID)

    def _tell(self, annotations: dict[LeaseKey, str], *, now: bool = False) -> None:
        if self._heartbeat is not None:
            self._heartbeat.update(annotations, now=now)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _stop_fenced_process(reason: str) -> None:
    """Exit at once: a newer attempt replaced this one, and the training threads may hang in a collective forever."""
    sys.stderr.write(f"elastic_trainer: this attempt has been superseded ({reason}); stopping\n")
    sys.stderr.flush()
    os._exit(1)
