"""Run a training script whose steps take at least half a second: `python slow_steps.py SCRIPT ARGUMENTS`."""

import runpy
import sys
import time
from typing import Any

from elastic_trainer import Session

STEP_SECONDS = 0.5

_after_step = Session.after_step


def _slow(session: Session, **facts: Any) -> Any:
    time.sleep(STEP_SECONDS)
    return _after_step(session, **facts)


Session.after_step = _slow  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
