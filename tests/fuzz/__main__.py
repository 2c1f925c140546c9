"""`python -m tests.fuzz --seconds 60`: cases of all targets in turn; a finding prints the command that repeats it."""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

from tests.fuzz.families import ALL as TARGETS


def main() -> int:
    """Run until the time is up; 1 if there were findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="only these")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=0, help="of each target; 0 for no limit")
    parser.add_argument("--findings", type=int, default=10, help="stop after so many")
    wanted = parser.parse_args()
    names, seed, findings = wanted.target or sorted(TARGETS), wanted.seed, 0
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    slowest = dict.fromkeys(names, (0.0, 0))
    started = time.monotonic()
    while time.monotonic() - started < wanted.seconds and (not wanted.cases or seed < wanted.seed + wanted.cases):
        for name in names:
            begun = time.thread_time()
            found = case(name, seed)
            slowest[name] = max(slowest[name], (time.thread_time() - begun, seed))
            counts[name][found or "finding"] += 1
            if found is None:
                findings += 1
                print(f"repeat with: python -m tests.fuzz --target {name} --seed {seed} --cases 1", file=sys.stderr)
        seed += 1
        if findings >= wanted.findings:
            break
    for name in names:
        kinds = ", ".join(f"{kind} {count}" for kind, count in counts[name].most_common())
        print(f"{name}: {counts[name].total()} cases ({kinds}); slowest {slowest[name][0]:.2f} s at {slowest[name][1]}")
    print(f"{findings} findings, seeds {wanted.seed} to {seed - 1}, {time.monotonic() - started:.0f} s")
    return 1 if findings else 0


def case(name: str, seed: int) -> str | None:
    """One case; None for a finding, which is printed."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            return TARGETS[name](Random(f"{name} {seed}"), Path(folder))
        except KeyboardInterrupt:
            raise
        except BaseException:
            traceback.print_exc(limit=-8)
            return None


if __name__ == "__main__":
    sys.exit(main())
