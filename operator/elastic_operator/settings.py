"""Settings of the operator: command line first, then environment, then defaults. The only reader of os.environ."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_operator.manifests.forbidden_accounts import Account
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.observed.health_monitors import NO_RULES, RuleError, Rules, parse_rules
from elastic_operator.observed.timeouts import Timeouts, meanings

LEASE_NAME = "elastic-training-operator"
"""Of the leader, unless the command line says otherwise."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How this process runs.

    Attributes:
        kubeconfig: credentials; None inside a cluster.
        namespaces: the only ones served; empty for all.
        lease_namespace: where the leader's Lease lies.
        lease_name: of the leader's Lease. Operators with the same one stand by for each other.
        identity: name of this process in that Lease.
        metrics_port: 0 for none.
        health_port: 0 for none.
        unhealthy_nodes: conditions and labels of nodes that mean that a node should be left.
        reshard_image: of reshard pods; None for the image of the training.
        allow_own_namespace: serve jobs in the operator's own namespace.
        pod_account: the ServiceAccount of this process' pod; None outside of a cluster.
    """

    kubeconfig: Path | None = None
    namespaces: tuple[str, ...] = ()
    leader_election: bool = True
    lease_namespace: str = "default"
    lease_name: str = LEASE_NAME
    identity: str = ""
    metrics_port: int = 0
    health_port: int = 0
    log_level: str = "INFO"
    json_logs: bool = False
    limits: Timeouts = Timeouts()  # noqa: RUF009 - frozen
    unhealthy_nodes: Rules = NO_RULES
    reshard_image: ReshardImage | None = None
    allow_own_namespace: bool = False
    pod_account: Account | None = None


def read(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of `elastic-operator run ...`."""
    env = os.environ if environment is None else environment
    parser = _parser(env)
    options = parser.parse_args(arguments)
    try:
        unhealthy_nodes = parse_rules(
            _listed(options.unhealthy_node_conditions), _listed(options.unhealthy_node_labels)
        )
    except RuleError as error:
        parser.error(str(error))
    kubeconfig = options.kubeconfig or (None if "KUBERNETES_SERVICE_HOST" in env else _default_kubeconfig(env))
    limits = {field.name: getattr(options, field.name) for field in dataclasses.fields(Timeouts)}
    return Settings(
        kubeconfig=Path(kubeconfig).expanduser() if kubeconfig else None,
        namespaces=tuple(dict.fromkeys(_listed(options.namespace))),
        leader_election=not options.no_leader_election,
        lease_namespace=options.lease_namespace,
        lease_name=options.lease_name,
        identity=f"{env.get('POD_NAME') or socket.gethostname()}_{os.getpid()}",
        metrics_port=options.metrics_port,
        health_port=options.health_port,
        log_level=options.log_level,
        json_logs=options.json_logs,
        limits=Timeouts(**limits),
        unhealthy_nodes=unhealthy_nodes,
        allow_own_namespace=options.allow_jobs_in_own_namespace,
        pod_account=_pod_account(env),
        reshard_image=(
            ReshardImage(name=options.reshard_image, pull_policy=options.reshard_image_pull_policy)
            if options.reshard_image
            else None
        ),
    )


def _pod_account(env: Mapping[str, str]) -> Account | None:
    namespace, name = env.get("POD_NAMESPACE"), env.get("POD_SERVICE_ACCOUNT")
    return Account(namespace=namespace, name=name) if namespace and name else None


def _listed(values: Sequence[str]) -> list[str]:
    return [item for value in values for item in value.split(",") if item]


def _default_kubeconfig(env: Mapping[str, str]) -> str:
    return env.get("KUBECONFIG") or str(Path(env.get("HOME") or "~") / ".kube" / "config")


def _parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-operator", description="Keeps training jobs running when GPUs come and go."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="serve ElasticTrainingJobs until stopped")
    run.add_argument("--kubeconfig", help="default: the pod's account, else $KUBECONFIG or ~/.kube/config")
    run.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME,...",
        help="serve only this namespace; may be repeated; default: all",
    )
    run.add_argument("--no-leader-election", action="store_true", help="for development: nobody else is running")
    run.add_argument("--lease-namespace", default=env.get("POD_NAMESPACE") or "default", help="of the leader's Lease")
    run.add_argument(
        "--lease-name",
        default=LEASE_NAME,
        help="of the leader's Lease; operators with the same one stand by for each other",
    )
    run.add_argument(
        "--allow-jobs-in-own-namespace",
        action="store_true",
        help="serve jobs in the operator's own namespace, whose pods can take its rights; default: refuse them",
    )
    run.add_argument("--metrics-port", type=int, default=0, help="serve Prometheus metrics; 0: do not")
    run.add_argument("--health-port", type=int, default=0, help="serve /healthz and /readyz; 0: do not")
    run.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    run.add_argument("--json-logs", action="store_true", help="one JSON object per line")
    run.add_argument(
        "--unhealthy-node-conditions",
        action="append",
        default=[],
        metavar="TYPE[=STATUS],...",
        help="leave nodes with such a condition (status True if left out; * is a wildcard); may be repeated",
    )
    run.add_argument(
        "--unhealthy-node-labels",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="leave nodes with such a label (* is a wildcard); may be repeated",
    )
    run.add_argument(
        "--reshard-image",
        default="",
        metavar="IMAGE",
        help="what reshard pods run; default: the training's image (docs/images.md tells when that is used anyway)",
    )
    run.add_argument(
        "--reshard-image-pull-policy",
        default="",
        choices=("", "Always", "IfNotPresent", "Never"),
        metavar="POLICY",
        help="Always, IfNotPresent or Never; default: Kubernetes' own",
    )
    defaults, about = Timeouts(), meanings()
    for field in dataclasses.fields(Timeouts):
        value = getattr(defaults, field.name)
        name = "--" + field.name.replace("_", "-")
        run.add_argument(
            name,
            type=type(value),
            default=value,
            metavar="SECONDS",
            help=f"{about.get(field.name, '')}; default {value:g}",
        )
    return parser
