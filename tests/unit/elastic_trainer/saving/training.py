"""A training without a framework, as a process: it saves plain files after every step.

Arguments: number of steps, bytes of the large file. It prints what it does. In `write`, after the first of its files,
it stands still while the file HOLD names the step.
"""

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from elastic_trainer.session import Session

HOLD = Path(os.environ["HOLD"])


def is_held(step: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return HOLD.read_text() == str(step)
    return False


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    steps, num_bytes = map(int, sys.argv[1:])
    session = Session.from_env(asynchronous=True)
    session.start()
    position = session.restore(lambda folder: print("load", folder, flush=True))

    def write(folder: Path, tag: str) -> None:
        step = session.position.step
        (folder / tag / "part").mkdir(parents=True)
        (folder / tag / "part" / "small").write_text(f"step {step}")
        print("writing", step, flush=True)
        while is_held(step):
            time.sleep(0.01)
        with open(folder / tag / "large", "wb") as stream:
            stream.write(os.urandom(1000))
            stream.truncate(num_bytes)
        (folder / "latest").write_text(tag)

    for step in range(position.step, steps):
        action = session.after_step(step=step + 1, samples=8 * (step + 1), loss=1.0)
        print("step", step + 1, flush=True)
        session.save(write, data={"seed": 7})
        print("staged", step + 1, flush=True)
        if action.stop:
            break
    try:
        session.finish()
    finally:
        print("finished", flush=True)


main()
