"""`python -m testbed`: a real Kubernetes cluster on this machine, and what can happen to it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from testbed import cluster, components, example, extensions, faults, helm, kueue, machine, oci, project, shellenv
from testbed.errors import CannotRunHereError, TestbedError
from testbed.paths import CONTROL_PLANE, run_dir
from testbed.provider import RESOURCES, Provider, Size
from testbed.providers import PROVIDERS

_NODE_COMMANDS: dict[str, tuple[Callable[[str], None], str]] = {
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
    parser.set_defaults(provider="testbed")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_shared(commands)
    commands.add_parser("fetch", help="download or build Kubernetes, helm and Kueue, into the cache")
    commands.add_parser("extensions", help="compile DeepSpeed's operators for the CPU, into the cache")
    made = commands.add_parser("images", help="build the project's images, without a container engine, and print sizes")
    made.add_argument("--load", action="store_true", help="bring them onto the nodes of the running test bed")
    made.add_argument(
        "--archive", type=Path, metavar="FILE", help="write operator and resharder there, and nothing else"
    )
    for name, (_, text) in _NODE_COMMANDS.items():
        commands.add_parser(name, help=text).add_argument("node")
    text = "the same cluster on kind: nodes are containers of Docker"
    kind = commands.add_parser("kind", help=text, description=f"{text[0].upper()}{text[1:]}.")
    kind.set_defaults(provider="kind")
    on_kind = kind.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_shared(on_kind)
    on_kind.add_parser("load", help="build the project's images, and `kind load` them")
    return parser


def _add_shared(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that every provider understands."""
    up = commands.add_parser("up", help="bring the cluster up (kept if an equal one is up already)")
    up.add_argument("--gpu-nodes", type=int, default=3, metavar="N")
    up.add_argument("--gpus", type=int, default=2, metavar="N", help="simulated GPUs per GPU node")
    up.add_argument(
        "--resource",
        action="append",
        metavar="NAME",
        help=f"name of the simulated GPUs; may be repeated; default: {' and '.join(RESOURCES)}",
    )
    up.add_argument(
        "--clocks",
        choices=("fast", "default"),
        default="fast",
        help="fast: a dead node is NotReady after 6 s; default: Kubernetes' own 50 s",
    )
    commands.add_parser("down", help="remove the cluster without a trace")
    commands.add_parser("status", help="machines and whether they are on")
    commands.add_parser("kubeconfig", help="print the path of the admin's kubeconfig")
    commands.add_parser("env", help='print what a shell needs: eval "$(python -m testbed env)"')
    job = commands.add_parser("example", help="print the example's job for this cluster, for kubectl apply -f -")
    job.add_argument("--namespace", default="default", metavar="NAME", help="of the job and its claim")
    commands.add_parser("kill-node", help="power loss: SIGKILL of everything on the node").add_argument("node")
    commands.add_parser("heal-node", help="switch the node on again, whatever was done to it").add_argument("node")
    for name, text in (("gpu-fail", "make a GPU unhealthy"), ("gpu-heal", "make a GPU healthy again")):
        command = commands.add_parser(name, help=text)
        command.add_argument("node")
        command.add_argument("device", help="for instance gpu0")


def _run(options: argparse.Namespace) -> int:
    command: str = options.command
    provider = PROVIDERS[options.provider]()
    if command == "up":
        provider.up(_size(options))
    elif command == "down":
        provider.down()
    elif command == "status":
        return _status() if options.provider == "testbed" else _status_of(provider)
    elif command == "kubeconfig":
        sys.stdout.write(f"{provider.kubeconfig()}\n")
    elif command == "env":
        sys.stdout.write(shellenv.exports(provider.kubeconfig()))
    elif command == "example":
        provider.kubeconfig()
        sys.stdout.write(yaml.safe_dump_all(example.objects(options.namespace, provider), sort_keys=False))
    elif command == "kill-node":
        provider.kill_node(options.node)
    elif command == "heal-node":
        provider.heal_node(options.node)
    elif command == "gpu-fail":
        provider.fail_gpu(options.node, options.device)
    elif command == "gpu-heal":
        provider.heal_gpu(options.node, options.device)
    elif command == "load":
        provider.load_images()
    else:
        _run_on_test_bed(options)
    return 0


def _run_on_test_bed(options: argparse.Namespace) -> None:
    """Run a command that only the test bed without Docker has."""
    if options.command == "fetch":
        cluster.check_machine()
        components.ensure()
        helm.ensure()
        kueue.ensure()
    elif options.command == "extensions":
        extensions.compile_all()
    elif options.command == "images":
        _images(load=options.load, archive=options.archive)
    else:
        _NODE_COMMANDS[options.command][0](options.node)


def _size(options: argparse.Namespace) -> Size:
    return Size(
        num_gpu_nodes=options.gpu_nodes,
        gpus_per_node=options.gpus,
        resources=tuple(options.resource or RESOURCES),
        fast_clocks=options.clocks == "fast",
    )


def _status_of(provider: Provider) -> int:
    """Print the nodes of a provider and whether they are on; 0 if all are."""
    machines = provider.machines()
    for name, is_on in machines.items():
        sys.stdout.write(f"{name:<20} {'on' if is_on else 'off'}\n")
    if not machines:
        sys.stdout.write("no cluster is up\n")
    return 0 if machines and all(machines.values()) else 1


def _images(*, load: bool, archive: Path | None) -> None:
    if archive is not None:
        with project.lock():
            built = tuple(image for image in project.definitions() if image.reference != project.EXAMPLE)
            oci.write(archive, built)
    elif load:
        built = cluster.ensure_images()
    else:
        with project.lock():
            built = project.ensure_built()
    for image in built:
        layers = ", ".join(f"{layer.name} {layer.size_bytes / 1e6:.1f}" for layer in image.layers)
        sys.stdout.write(f"{image.reference}  {image.size_bytes / 1e6:.1f} MB ({layers})\n")
    sys.stdout.write(f"{archive or project.archive(built)}\n")


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
