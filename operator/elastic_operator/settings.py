"""Settings of the operator, from the command line and the environment. No other module reads os.environ."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import os
import re
import socket
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from elastic_operator.api.schema_types import not_expected
from elastic_operator.api.serialization import adapter_of
from elastic_operator.api.validation import Problem, find_problems, shorten
from elastic_operator.manifests.forbidden_accounts import Account
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.observed.health_monitors import NO_RULES, RuleError, Rules, parse_rules
from elastic_operator.observed.timeouts import Timeouts, describe_timeouts
from elastic_operator.reconcile.notifications.formats import Format
from elastic_operator.reconcile.notifications.notification import NotificationKind

LEASE_NAME = "elastic-training-operator"
"""Default name of the leader's Lease."""

URL_VARIABLE = "ETJ_NOTIFICATION_URL"
"""Environment variable with the webhook's URL. It is no option, because everybody on the machine can read those."""

_MAX_URL = 2048

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"


def _check_label(name: str) -> str:
    if not re.fullmatch(_LABEL, name):
        raise not_expected("the name of a namespace: lower-case letters, digits and '-'")
    return name


def _expand(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:
        raise not_expected(f"a path ({error})") from error


def _check_subdomain(name: str) -> str:
    if not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name):
        raise not_expected("the name of an object: lower-case letters, digits, '-' and '.'")
    return name


def _check_source(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]{1,255}", text):
        raise not_expected("a URI or a part of one, of 1 to 255 characters, such as cluster-a")
    return text


LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Port = Annotated[int, Field(ge=0, le=65_535)]
NamespaceName = Annotated[str, Field(max_length=63), AfterValidator(_check_label)]
LeaseName = Annotated[str, Field(max_length=253), AfterValidator(_check_subdomain)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NotificationSettings:
    """Destination and kinds of notifications; see docs/notifications.md.

    Attributes:
        url: of the webhook; secret, as its path is usually its password.
        kinds: what is told.
        source: identifies this operator for receivers of several clusters.
    """

    url: str = dataclasses.field(repr=False)
    format: Format = Format.SLACK
    kinds: Annotated[tuple[NotificationKind, ...], Field(max_length=64)] = tuple(NotificationKind)
    source: Annotated[str, AfterValidator(_check_source)] = LEASE_NAME


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of this process.

    Attributes:
        kubeconfig: file with credentials; None inside a cluster.
        namespaces: namespaces to serve; empty for all.
        lease_namespace: namespace of the leader's Lease.
        lease_name: name of the leader's Lease. Operators with the same Lease are standbys of each other.
        identity: name of this process in that Lease.
        metrics_port: port of the metrics; 0 for none.
        health_port: port of the probes; 0 for none.
        status_page_port: port of the status page; 0 for none.
        status_page_address: IP address and port at which other replicas reach it; empty if that is not known.
        limits: timeouts of the operator.
        unhealthy_nodes: conditions and labels of nodes that jobs have to leave.
        reshard_image: image of reshard pods; None for the image of the training.
        allow_own_namespace: serve jobs in the operator's own namespace.
        pod_account: ServiceAccount of this process's pod; None outside a cluster.
        notifications: where notifications go; None for nowhere.
        lacks_webhook_url: True if options of notifications are set, but there is no URL.
        environment: environment variables: the address of the API server in a pod, and what credential plugins get.
    """

    kubeconfig: Annotated[Path, BeforeValidator(_expand)] | None = None
    namespaces: tuple[NamespaceName, ...] = ()
    leader_election: bool = True
    lease_namespace: NamespaceName = "default"
    lease_name: LeaseName = LEASE_NAME
    identity: str = ""
    metrics_port: Port = 0
    health_port: Port = 0
    status_page_port: Port = 0
    status_page_address: str = ""
    log_level: LogLevel = "INFO"
    json_logs: bool = False
    limits: Timeouts = Timeouts()  # noqa: RUF009 - frozen
    unhealthy_nodes: Rules = NO_RULES
    reshard_image: ReshardImage | None = None
    allow_own_namespace: bool = False
    pod_account: Account | None = None
    notifications: NotificationSettings | None = None
    lacks_webhook_url: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the command line `run ...` and the environment.

    Args:
        arguments: command line without the program name.
        environment: defaults to `os.environ`.
    """
    env = os.environ if environment is None else environment
    parser = _parser(env)
    options = parser.parse_args(arguments)
    try:
        unhealthy_nodes = parse_rules(
            _split_names(options.unhealthy_node_conditions), _split_names(options.unhealthy_node_labels)
        )
        webhook_url = read_webhook_url(env.get(URL_VARIABLE, ""), allow_http=options.notification_allow_http)
    except (RuleError, WebhookUrlError) as error:
        parser.error(str(error))
    try:
        return adapter_of(Settings).validate_python(_values(options, env, unhealthy_nodes, webhook_url))
    except ValidationError as error:
        parser.error("; ".join(map(_sentence, find_problems(adapter_of(Settings), error))))


def _sentence(problem: Problem) -> str:
    *_, field = (str(item) for item in problem.location if not isinstance(item, int))
    names = {"namespaces": "namespace", "kinds": "notification_kinds", "source": "notification_source"}
    option = names.get(field, field).replace("_", "-")
    return f"--{option} is {shorten(problem.value)}: expected {problem.expected}"


def _values(
    options: argparse.Namespace, env: Mapping[str, str], unhealthy_nodes: Rules, webhook_url: str
) -> dict[str, Any]:
    """Return the fields of `Settings`, not validated."""
    kubeconfig = options.kubeconfig or (None if "KUBERNETES_SERVICE_HOST" in env else _default_kubeconfig(env))
    limits = {field.name: getattr(options, field.name) for field in dataclasses.fields(Timeouts)}
    return {
        "kubeconfig": kubeconfig or None,
        "namespaces": _names_of(options.namespace),
        "leader_election": not options.no_leader_election,
        "lease_namespace": options.lease_namespace,
        "lease_name": options.lease_name,
        "identity": f"{env.get('POD_NAME') or socket.gethostname()}_{os.getpid()}",
        "metrics_port": options.metrics_port,
        "health_port": options.health_port,
        "status_page_port": options.status_page_port,
        "status_page_address": _page_address(env.get("POD_IP", ""), options.status_page_port),
        "log_level": options.log_level,
        "json_logs": options.json_logs,
        "limits": limits,
        "unhealthy_nodes": unhealthy_nodes,
        "allow_own_namespace": options.allow_jobs_in_own_namespace,
        "pod_account": _pod_account(env),
        "notifications": _notification_values(options, webhook_url),
        "lacks_webhook_url": bool(not webhook_url and (options.notification_format or options.notification_kinds)),
        # Credential plugins get these variables; the webhook is none of their business.
        "environment": {name: value for name, value in env.items() if name != URL_VARIABLE},
        "reshard_image": (
            ReshardImage(name=options.reshard_image, pull_policy=options.reshard_image_pull_policy)
            if options.reshard_image
            else None
        ),
    }


class WebhookUrlError(ValueError):
    """The webhook's URL is invalid. The message never contains it."""


def read_webhook_url(text: str, *, allow_http: bool = False) -> str:
    """Return the webhook's URL without white space around it; empty if there is none.

    Raises:
        WebhookUrlError: it is no URL that notifications may be sent to.
    """
    text = text.strip()
    problem = _find_url_problem(text, allow_http=allow_http) if text else ""
    if problem:
        raise WebhookUrlError(
            f"{URL_VARIABLE}: {problem}; found another value, which is not shown because it is secret"
        )
    return text


def _find_url_problem(text: str, *, allow_http: bool) -> str:
    """Return what was expected of a URL; empty if it is valid. Exceptions of the parser are not passed on."""
    expected = "expected a URL of at most 2048 printable ASCII characters without spaces"
    if len(text) > _MAX_URL or not re.fullmatch(r"[!-~]+", text):
        return expected
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return f"{expected}, with a valid host and port"
    if parts.scheme != "https" and not (allow_http and parts.scheme == "http"):
        return "expected https://... (http://... needs --notification-allow-http)"
    if not host or port == 0:
        return f"{expected}, with a valid host and port"
    if parts.username is not None or parts.password is not None or parts.fragment:
        return f"{expected}, without user name, password and fragment"
    return ""


def _notification_values(options: argparse.Namespace, url: str) -> dict[str, Any] | None:
    if not url:
        return None
    return {
        "url": url,
        "format": options.notification_format or Format.SLACK,
        "kinds": _names_of(options.notification_kinds) or tuple(NotificationKind),
        "source": options.notification_source or options.lease_name,
    }


def _page_address(ip: str, port: int) -> str:
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:  # outside a cluster the variable is missing
        return ""
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{port}" if port else ""


def _pod_account(env: Mapping[str, str]) -> Account | None:
    namespace, name = env.get("POD_NAMESPACE"), env.get("POD_SERVICE_ACCOUNT")
    return Account(namespace=namespace, name=name) if namespace and name else None


def _names_of(values: Sequence[str]) -> tuple[str, ...]:
    """Return names without repetitions; values without any name stay as they are, because no name would mean all."""
    return tuple(dict.fromkeys(_split_names(values))) or tuple(values)


def _split_names(values: Sequence[str]) -> list[str]:
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
    run.add_argument("--no-leader-election", action="store_true", help="for development, when no other operator runs")
    run.add_argument(
        "--lease-namespace", default=env.get("POD_NAMESPACE") or "default", help="namespace of the leader's Lease"
    )
    run.add_argument(
        "--lease-name",
        default=LEASE_NAME,
        help="name of the leader's Lease; operators with the same Lease are standbys of each other",
    )
    run.add_argument(
        "--allow-jobs-in-own-namespace",
        action="store_true",
        help="serve jobs in the operator's own namespace, whose pods can take its rights; default: refuse them",
    )
    run.add_argument("--metrics-port", type=int, default=0, help="port of the Prometheus metrics; 0: none")
    run.add_argument("--health-port", type=int, default=0, help="port of /healthz and /readyz; 0: none")
    run.add_argument(
        "--status-page-port",
        type=int,
        default=0,
        help="port of the status page, which shows all jobs to whoever reaches it (docs/status-page.md); 0: none",
    )
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
        help="image of reshard pods; default: the training's image (docs/images.md says when that is used anyway)",
    )
    run.add_argument(
        "--reshard-image-pull-policy",
        default="",
        choices=("", "Always", "IfNotPresent", "Never"),
        metavar="POLICY",
        help="Always, IfNotPresent or Never; default: Kubernetes' own",
    )
    _add_notification_options(run)
    defaults, about = Timeouts(), describe_timeouts()
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


def _add_notification_options(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--notification-format",
        default="",
        choices=("", *map(str, Format)),
        metavar="FORMAT",
        help=f"format of notifications to the URL in ${URL_VARIABLE}: {', '.join(Format)}; default: slack",
    )
    run.add_argument(
        "--notification-kinds",
        action="append",
        default=[],
        metavar="KIND,...",
        help=f"which to send: {', '.join(NotificationKind)}; may be repeated; default: all",
    )
    run.add_argument(
        "--notification-source",
        default="",
        metavar="URI",
        help="identifies this operator to the receiver; default: the name of the leader's Lease",
    )
    run.add_argument(
        "--notification-allow-http",
        action="store_true",
        help="permit http:// in the URL, for a receiver in a network that you trust; default: https:// only",
    )
