"""`make bench`: reshard beside what one would use instead, on the same real checkpoints, in one run."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable

from benchmarks import (
    claims,
    controlling,
    converting,
    loading,
    many_pods,
    objects,
    scale,
    sharing,
    stall,
    steering,
    virtual,
)
from benchmarks.checkpoints import OUTPUT, ROOT

PAGE = ROOT / "docs/benchmarks.md"
SECTIONS: dict[str, Callable[[int], str]] = {
    "zero1": converting.zero1,
    "zero1-large": converting.zero1_large,
    "zero3": converting.zero3,
    "virtual": virtual.virtual,
    "dcp": loading.dcp,
    "workers": sharing.workers,
    "claims": claims.claims,
    "objects": objects.objects,
    "steering": steering.steering,
    "stall": stall.stall,
    "scale": scale.scale,
    "operator": controlling.operator,
    "pods": many_pods.pods,
    "memory": converting.memory,
}


def main() -> int:
    """Measure the sections asked for, print their tables and put them into docs/benchmarks.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all but memory")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown sections {', '.join(sorted(unknown))}: expected some of {', '.join(SECTIONS)}")
    OUTPUT.mkdir(exist_ok=True)
    for name in options.sections or [name for name in SECTIONS if name != "memory"]:
        text = SECTIONS[name](options.repeat)
        machine = f"{os.cpu_count()} processors, {platform.system()} {platform.release().split('-')[0]}, Python "
        runs = f"median of {options.repeat} (all in brackets)" if "median (all)" in text else "one run"
        text += f"\nMachine: {machine}{platform.python_version()}; {runs}.\n"
        sys.stdout.write(f"\n{text}\n")
        _publish(name, text)
    return 0


def _publish(section: str, text: str) -> None:
    """Replace a section's table in the page."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {section}:begin -->\n", f"<!-- {section}:end -->"
    head, rest = page.split(begin)
    PAGE.write_text(head + begin + text + end + rest.split(end)[1], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
