"""`python -m testbed`: a real Kubernetes cluster on this machine, and what can happen to it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import yaml

from testbed import cluster, components, example, extensions, faults, helm, kueue, machine, project, shellenv
from testbed.errors import CannotRunHereError, TestbedError
from testbed.paths import CONTROL_PLANE, kubeconfig, run_dir

_NODE_COMMANDS: dict[str, tuple[Callable[[str], None], str]] = {
    "kill-node": (faults.kill_node, "power loss: SIGKILL of everything on the node"),
    "heal-node": (faults.heal_node, "switch the node on again, whatever was done to it"),
    "hang": (faults.hang_kubelet, "stop the kubelet; containers go on"),
    "resume": (faults.resume_kubelet, "continue the kubelet"),
    "cut": (faults.unplug, "pull the network cable"),
    "restore": (faults.plug, "plug the network cable in"),
    "freeze": (faults.freeze_node, "pause the whole node"),
    "thaw": (faults.thaw_node, "continue the whole node"),
}


def main() -> int:
    """Run one command; errors are one clear message and exit code 1, or 3 where the machine cannot hold a test bed."""
    options = _parser().parse_args()
    try:
        return _run(options)
    except CannotRunHereError as error:
        sys.stderr.write(f"testbed: {error}\n")
        return 3
    except TestbedError as error:
        sys.stderr.write(f"testbed: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m testbed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="bring the cluster up (kept if an equal one is up already)")
    up.add_argument("--gpu-nodes", type=int, default=3, metavar="N")
    up.add_argument("--gpus", type=int, default=2, metavar="N", help="simulated GPUs per GPU node")
    up.add_argument(
        "--resource",
        action="append",
        metavar="NAME",
        help=f"name of the simulated GPUs; may be repeated; default: {' and '.join(cluster.RESOURCES)}",
    )
    up.add_argument(
        "--clocks",
        choices=("fast", "default"),
        default="fast",
        help="fast: a dead node is NotReady after 6 s; default: Kubernetes' own 50 s",
    )
    commands.add_parser("fetch", help="download or build Kubernetes, helm and Kueue, into the cache")
    commands.add_parser("extensions", help="compile DeepSpeed's operators for the CPU, into the cache")
    commands.add_parser("down", help="remove the cluster without a trace")
    commands.add_parser("status", help="machines and whether they are on")
    commands.add_parser("kubeconfig", help="print the path of the admin's kubeconfig")
    made = commands.add_parser("images", help="build the project's images, without a container engine, and print sizes")
    made.add_argument("--load", action="store_true", help="bring them onto the nodes of the running test bed")
    commands.add_parser("env", help='print what a shell needs: eval "$(python -m testbed env)"')
    job = commands.add_parser("example", help="print the example's job for this test bed, for kubectl apply -f -")
    job.add_argument("--namespace", default="default", metavar="NAME", help="of the job and its claim")
    for name, (_, text) in _NODE_COMMANDS.items():
        commands.add_parser(name, help=text).add_argument("node")
    for name, text in (("gpu-fail", "make a GPU unhealthy"), ("gpu-heal", "make a GPU healthy again")):
        command = commands.add_parser(name, help=text)
        command.add_argument("node")
        command.add_argument("device", help="for instance gpu0")
    return parser


def _run(options: argparse.Namespace) -> int:
    command: str = options.command
    if command == "up":
        cluster.up(
            num_gpu_nodes=options.gpu_nodes,
            gpus_per_node=options.gpus,
            resources=tuple(options.resource or cluster.RESOURCES),
            fast_clocks=options.clocks == "fast",
        )
    elif command == "fetch":
        cluster.check_machine()
        components.ensure()
        helm.ensure()
        kueue.ensure()
    elif command == "extensions":
        extensions.compile_all()
    elif command == "down":
        cluster.down()
    elif command == "status":
        return _status()
    elif command == "kubeconfig":
        cluster.members()
        sys.stdout.write(f"{kubeconfig()}\n")
    elif command == "images":
        _images(load=options.load)
    elif command == "env":
        cluster.members()
        sys.stdout.write(shellenv.exports())
    elif command == "example":
        cluster.members()
        sys.stdout.write(yaml.safe_dump_all(example.objects(options.namespace), sort_keys=False))
    elif command in _NODE_COMMANDS:
        _NODE_COMMANDS[command][0](options.node)
    elif command == "gpu-fail":
        faults.fail_gpu(options.node, options.device)
    else:
        faults.heal_gpu(options.node, options.device)
    return 0


def _images(*, load: bool) -> None:
    if load:
        built = cluster.ensure_images()
    else:
        with project.lock():
            built = project.ensure_built()
    for image in built:
        layers = ", ".join(f"{layer.name} {layer.size_bytes / 1e6:.1f}" for layer in image.layers)
        sys.stdout.write(f"{image.reference}  {image.size_bytes / 1e6:.1f} MB ({layers})\n")
    sys.stdout.write(f"{project.archive(built)}\n")


def _status() -> int:
    if not run_dir().exists():
        sys.stdout.write("no test bed is up\n")
        return 1
    rows = [(CONTROL_PLANE, "")] + [
        (node.name, f"{node.num_gpus} x {' = '.join(node.resources)}" if node.num_gpus else "")
        for node in cluster.members()
    ]
    for name, extra in rows:
        sys.stdout.write(f"{name:<14} {'on' if machine.is_running(name) else 'off':<4} {extra}\n")
    return 0 if cluster.is_ready() else 1


if __name__ == "__main__":
    sys.exit(main())
