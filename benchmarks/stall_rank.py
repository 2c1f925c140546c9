"""One rank of a training that saves in one of several ways, and how long its training stands still for that.

Started by `elastic_trainer.launch` for `benchmarks.stall`. Not a module of the product: it imports torch.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from elastic_trainer import Session
from elastic_trainer.stacks.dcp import make_save

SAVES = 3
STEP_SECONDS = 1.0
TENSORS = 40
WIDTH = 768


def make_state(num_bytes: int, rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's part of the state: fp32 tensors that no other rank has."""
    elements = num_bytes // 4 // TENSORS
    return {f"rank{rank}.{at}": torch.full((elements,), float(at), device=device) for at in range(TENSORS)}


def calibrate(device: torch.device) -> Callable[[], float]:
    """Return a training step of STEP_SECONDS of a processor or GPU; it returns its wall time."""
    matrix = torch.randn(WIDTH, WIDTH, device=device)
    clock = time.process_time if device.type == "cpu" else time.monotonic
    rounds, seconds = 1, 0.0
    while seconds < STEP_SECONDS / 2:
        rounds *= 2
        started = clock()
        run(matrix, rounds)
        seconds = clock() - started
    rounds = max(1, round(rounds * STEP_SECONDS / seconds))
    return lambda: run(matrix, rounds)


def run(matrix: Tensor, rounds: int) -> float:
    started = time.monotonic()
    for _ in range(rounds):
        matrix = (matrix @ matrix).clamp(-1, 1)
    if matrix.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.monotonic() - started


def of_session(session: Session, state: dict[str, Tensor], *, by_dcp: bool) -> Callable[[int], Callable[[], bool]]:
    """Return a function that saves through the session, and returns whether the commit is published."""

    save_by_dcp = make_save(session) if by_dcp else None

    def write(folder: Path, tag: str) -> object:
        if save_by_dcp is not None:
            return save_by_dcp(state, folder / tag)
        (folder / tag).mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / tag / f"rank-{session.settings.rank}.pt")
        return None

    def save(number: int) -> Callable[[], bool]:
        session.after_step(step=number, samples=number, loss=0.0)
        folder = session.save(write, format_="dcp" if by_dcp else "pt")
        return (folder / "COMMIT.json").exists

    return save


def of_dcp(root: Path, state: dict[str, Tensor], *, is_async: bool) -> Callable[[int], Callable[[], bool]]:
    """Return a function that saves by torch alone, and returns whether the files are written."""

    def save(number: int) -> Callable[[], bool]:
        folder = root / f"dcp-{number}"
        if not is_async:
            dcp_save(state, checkpoint_id=folder)
            return lambda: True
        future = async_save(state, checkpoint_id=folder)
        return lambda: bool(future.done())  # type: ignore[union-attr]

    return save


def main() -> None:
    """Save SAVES times, train until each save is written, and write what rank 0 has seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("session", "session-async", "session-dcp-async", "dcp", "dcp-async"))
    parser.add_argument("gigabytes", type=float, help="of all ranks")
    parser.add_argument("root", type=Path)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    session = Session.from_env(keep=1, asynchronous="async" in options.how)
    distributed.init_process_group("gloo")
    session.start()
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")  # all on one GPU
    state = make_state(int(options.gigabytes * 1e9) // world_size, rank, device)
    step = calibrate(device)
    if options.how.startswith("session"):
        save = of_session(session, state, by_dcp="dcp" in options.how)
    else:
        save = of_dcp(options.root, state, is_async="async" in options.how)
    distributed.barrier()
    quiet = [step() for _ in range(3)]
    stalls, steps, durable = [], [], []
    for number in range(1, SAVES + 1):
        distributed.barrier()
        started = time.monotonic()
        is_written = save(number)
        stall = torch.tensor([time.monotonic() - started])
        while not is_written():
            steps.append(step())
        seconds = time.monotonic() - started
        distributed.all_reduce(stall, op=distributed.ReduceOp.MAX)
        stalls.append(float(stall))
        durable.append(seconds)
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(options.root / f"dcp-{number - 1}", ignore_errors=True)
    session.finish()
    if rank == 0:
        report = {"quiet": quiet, "stalls": stalls, "steps": steps, "durable": durable}
        options.report.write_text(json.dumps(report), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
