"""A training loop without a model: heartbeat, steps, commits, drain, SIGTERM. Starts in half a second.

Arguments: number of steps, steps between commits (0: never), exit code to die with after the third step (0: do not),
and optionally a folder with a checkpoint. Without it a commit holds nothing that could be resharded. With it every
commit of a training that started from nothing is a copy of that folder; one that was resumed commits nothing, unless
a last argument `carry` lets its commits be copies of the one that it resumed from.
On several nodes the first does all this, and the others wait for their end. SIGTERM asks for a commit, as in a real
training: of the first node itself, of another one through the operator. CLOCK_OFFSET_SECONDS makes the clock wrong,
and CLOCK_OFFSET_FILE names a file with this number, which may change.
HANG_AT_STEP lets no step end after this one, while the heartbeat goes on; SILENT_AT_STEP stops the heartbeat too. Both
hold for the first attempt only.
"""

import datetime
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from elastic_trainer.errors import FencedError
from elastic_trainer.heartbeat import Heartbeat
from elastic_trainer.lease import LeaseMailbox
from elastic_trainer.termination import Termination
from reshard.commits.commit import Commit, CommittedFile, read_commit, write_commit
from reshard.contract import Env, LeaseKey, Request, TrainerExit, TrainerPhase
from reshard.storage.durable import file_crc32
from reshard.topology import Topology

signal.signal(signal.SIGTERM, lambda *_: os._exit(143))


GIVEN = Path(sys.argv[4]) if len(sys.argv) > 4 else None
CARRY = sys.argv[5:] == ["carry"]


class WrongClock(datetime.datetime):
    """The time as a machine with a wrong clock tells it; the Lease's renewTime comes from here."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return super().now(tz) + datetime.timedelta(seconds=clock_offset())


def clock_offset() -> float:
    return float(Path(OFFSET_FILE).read_text()) if OFFSET_FILE else OFFSET_SECONDS


OFFSET_FILE = os.environ.get("CLOCK_OFFSET_FILE", "")
OFFSET_SECONDS = float(os.environ.get("CLOCK_OFFSET_SECONDS", "0"))
if OFFSET_FILE or OFFSET_SECONDS:
    clock = time.time
    time.time = lambda: clock() + clock_offset()
    datetime.datetime = WrongClock  # type: ignore[misc]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time()))


def save(step: int) -> str:
    folder = Path(os.environ[Env.CHECKPOINT_ROOT]) / f"a{os.environ[Env.ATTEMPT]}" / f"step-{step:08d}"
    if GIVEN is None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").write_text(f"{step}\n")
    else:
        source = os.environ[Env.RESUME] or GIVEN
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("COMMIT*"))
    commit = Commit(
        format="light" if GIVEN is None else "deepspeed",
        step=step,
        samples=20 * step,
        topology=Topology.from_json(os.environ[Env.TOPOLOGY]),
        attempt=int(os.environ[Env.ATTEMPT]),
        writer="trainer",
        files=[
            CommittedFile(path=path.name, num_bytes=path.stat().st_size, crc32=file_crc32(path))
            for path in sorted(folder.iterdir())
        ],
    )
    write_commit(folder, commit)
    return commit.ref(folder).to_json()


def resumed_step(folder: str) -> int:
    """The step of a commit; that of its name if it is a conversion of a copy of GIVEN, which states another one."""
    return int(Path(folder).name.split("-")[1].split(".")[0]) if CARRY else read_commit(folder).step


def wait_for_the_end(mailbox: LeaseMailbox, termination: Termination) -> int:
    """Be a rank of another node: it goes on until all ranks have drained."""
    while True:
        time.sleep(0.2)
        if termination.is_requested:
            try:
                if mailbox.read().get(LeaseKey.PHASE) == TrainerPhase.DRAINED:
                    return TrainerExit.DRAINED
            except FencedError:
                return 1


def main() -> int:
    steps, every, dies = map(int, sys.argv[1:4])
    may_commit = GIVEN is None or CARRY or not os.environ[Env.RESUME]
    may_commit_late = GIVEN is None or CARRY
    every = every if may_commit else 0
    mailbox = LeaseMailbox(
        namespace=os.environ[Env.NAMESPACE],
        name=os.environ[Env.LEASE],
        holder=os.uname().nodename,
        server=(os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])),
    )
    termination = Termination(mailbox, announce=lambda: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    termination.install()
    if os.environ["PET_NODE_RANK"] != "0":
        termination.expect_commit()
        return wait_for_the_end(mailbox, termination)
    is_first = os.environ[Env.ATTEMPT] == "1"
    hang, silence = (int(os.environ.get(name, "0")) * is_first for name in ("HANG_AT_STEP", "SILENT_AT_STEP"))
    heart = Heartbeat(mailbox, every_seconds=1.0, on_fenced=lambda reason: os._exit(1))
    heart.start()
    step = resumed_step(os.environ[Env.RESUME]) if os.environ[Env.RESUME] else 0
    begin = step
    while step < steps:
        time.sleep(0.2)
        step += 1
        notes = {LeaseKey.PHASE: TrainerPhase.TRAINING, LeaseKey.STEP: str(step), LeaseKey.STEP_TIME: now()}
        if step == begin + 1:
            notes[LeaseKey.FIRST_STEP_TIME] = now()
        termination.expect_commit()
        draining = heart.request == Request.DRAIN or termination.is_requested
        if (draining and may_commit_late) or (every and step % every == 0):
            notes[LeaseKey.COMMIT] = save(step)
        if draining:
            notes[LeaseKey.PHASE] = TrainerPhase.DRAINED
        heart.update(notes, now=True)
        if draining:
            heart.stop()
            return TrainerExit.DRAINED
        if silence and step == silence:
            heart.stop()
        while step in (hang, silence):
            time.sleep(1)
        if dies and step == begin + 3:
            heart.flush()
            return dies
    heart.update({LeaseKey.PHASE: TrainerPhase.COMPLETE, LeaseKey.COMMIT: save(step)})
    heart.stop()
    return 0


sys.exit(main())
