"""Command line of the demo."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from testbed.providers import PROVIDERS

NAMESPACE = "etj-demo"
LAUNCH = (sys.executable, "-m", "elastic_trainer.launch", "--preload", "torch")
JOB = "gpt"


def parse() -> argparse.Namespace:
    """Options; without any, everything happens on a test bed on this machine."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=240, help="optimizer steps of the whole job (default: %(default)s)"
    )
    parser.add_argument("--kill-at", type=int, default=40, help="step after which a node dies (default: %(default)s)")
    parser.add_argument(
        "--resource", default="amd.com/gpu", help="amd.com/gpu, nvidia.com/gpu or another extended resource"
    )
    parser.add_argument("--output", type=Path, default=Path("demo/output"), help="report, logs and picture")
    parser.add_argument("--picture", type=Path, default=Path("demo/recovery.png"))
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of a loss")
    parser.add_argument("--keep", action="store_true", help="leave test bed and job as they are at the end")
    parser.add_argument(
        "--cluster",
        choices=tuple(PROVIDERS),
        default="testbed",
        help="what the cluster on this machine is made of: namespaces of this machine, or containers of Docker",
    )
    other = parser.add_argument_group("a cluster that is there already")
    other.add_argument(
        "--kubeconfig", type=Path, help="use this cluster; it needs 3 nodes with 2 GPUs of --resource each"
    )
    other.add_argument("--image", help="image with torch, deepspeed, this distribution and examples/ in /app")
    other.add_argument("--helm-values", type=Path, help="values of the chart, for instance where its images are")
    other.add_argument("--claim", help="existing ReadWriteMany claim in namespace etj-demo")
    other.add_argument("--kill-command", help="shell command that ends node {node}, for instance `docker kill {node}`")
    other.add_argument("--heal-command", help="shell command that brings node {node} back, `docker start {node}`")
    options = parser.parse_args()
    needed = ("image", "claim", "kill_command", "heal_command")
    absent = [f"--{name.replace('_', '-')}" for name in needed if not getattr(options, name)]
    if options.kubeconfig and absent:
        parser.error(f"--kubeconfig also needs {', '.join(absent)}")
    return options
