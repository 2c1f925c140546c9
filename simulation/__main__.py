"""`make simulate`: what failures cost at 1,024, 4,096 and 16,384 GPUs, by policy; the operator's decisions are real."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import sys
import time

from simulation import report
from simulation.assumptions import Assumptions
from simulation.policies import POLICIES
from simulation.run import Result, simulate

SIZES = (1024, 4096, 16_384)
SEED = 1


def main(arguments: list[str] | None = None) -> int:
    """Simulate every policy at every size, print the table, and put it into docs/goodput.md."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), metavar="GPUS", help="sizes of the cluster"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the failures")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other values of assumptions")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--print", action="store_true", help="do not change docs/goodput.md")
    options = parser.parse_args(arguments)
    assumptions = read_assumptions(options.set)
    begin = time.monotonic()
    results = simulate_all(options.sizes, assumptions, seed=options.seed, num_processes=options.jobs)
    sys.stdout.write(report.results_table(results, assumptions))
    sys.stdout.write(f"\n{time.monotonic() - begin:.0f} s\n")
    is_default = (options.sizes, options.seed, assumptions) == (list(SIZES), SEED, Assumptions())
    if is_default and not options.print:
        report.publish(results, assumptions)
        sys.stdout.write(f"written: {report.PAGE}, {report.PICTURE}\n")
    return 0


def read_assumptions(pairs: list[str]) -> Assumptions:
    """Return the assumptions with the values of `NAME=VALUE` pairs.

    Raises:
        SystemExit: a name is not that of an assumption, or a value is no number.
    """
    names = [field.name for field in dataclasses.fields(Assumptions)]
    changes: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            changes[name] = float(value)
        except ValueError:
            raise SystemExit(f"--set {pair}: expected NAME=NUMBER") from None
        if name not in names:
            raise SystemExit(f"--set {pair}: expected one of {', '.join(names)}")
    return dataclasses.replace(Assumptions(), **changes)


def simulate_all(sizes: list[int], assumptions: Assumptions, *, seed: int, num_processes: int) -> list[Result]:
    """Simulate every policy at every size, in processes of their own; the order of the results is that of the table."""
    cases = [(policy, size) for size in sizes for policy in POLICIES]
    with concurrent.futures.ProcessPoolExecutor(num_processes) as pool:
        # The largest take longest: they start first.
        futures = {
            case: pool.submit(simulate, case[0], case[1], assumptions, seed=seed)
            for case in sorted(cases, key=lambda case: -case[1])
        }
        return [futures[case].result() for case in cases]


if __name__ == "__main__":
    sys.exit(main())
