"""What each verb reads, asks and answers: text for people and an object for machines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic_operator.api.serialization import to_wire
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin import steer
from elastic_operator.plugin.cluster import Cluster
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.logs import logs
from elastic_operator.plugin.pages.forecast import forecast
from elastic_operator.plugin.pages.job_report import read_spec, read_status, report
from elastic_operator.plugin.pages.listing import entry, listing
from elastic_operator.plugin.pages.plan_page import outlook
from elastic_operator.plugin.pages.status_page import story
from elastic_operator.plugin.pages.text import printable
from elastic_operator.plugin.pages.whatif import Change, observe, parse_lose
from elastic_operator.reconcile.context import Context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a verb says; `note` goes to stderr."""

    text: str = ""
    value: Any = None
    note: str = ""


def run(cluster: Cluster, options: argparse.Namespace) -> Answer:
    """Do what the command line says.

    Raises:
        PluginError: it cannot be done.
    """
    return _VERBS[options.verb](cluster, options)


def _list(cluster: Cluster, options: argparse.Namespace) -> Answer:
    now = time.time()
    entries = [entry(report(item, now)) for item in cluster.jobs(everywhere=options.all_namespaces)]
    value = {"items": [to_wire(item) for item in entries]}
    if not entries:
        where = "" if options.all_namespaces else f" in {cluster.namespace} namespace"
        return Answer(value=value, note=f"No ElasticTrainingJobs found{where}.")
    return Answer(text=listing(printable(entries), now, everywhere=options.all_namespaces), value=value)


def _status(cluster: Cluster, options: argparse.Namespace) -> Answer:
    resource, note = cluster.job(options.name), ""
    events: list[dict[str, Any]] = []
    try:
        events = cluster.events(options.name)
    except PluginError as error:
        note = f"without events: {error}"
    now = time.time()
    job = report(resource, now, [item for item in events if _is_about(item, resource)])
    return Answer(text=story(printable(job), now, max_events=options.events), value=to_wire(job), note=note)


def _is_about(event: Mapping[str, Any], resource: Mapping[str, Any]) -> bool:
    # A job of the same name that was deleted has left events of its own.
    return (event.get("involvedObject") or {}).get("uid") in (None, "", resource["metadata"]["uid"])


def _plan(cluster: Cluster, options: argparse.Namespace) -> Answer:
    try:
        lose = parse_lose(name for group in options.lose for name in group)
    except ValueError as error:
        raise PluginError(Exit.USAGE, f"--lose {error}") from error
    change = Change(lose=lose, num_gpus=options.gpus, add_nodes=options.add)
    resource = cluster.job(options.name)
    spec, problem = read_spec(resource)
    if spec is None:
        raise PluginError(Exit.REFUSED, f"{options.name} cannot be planned, its spec makes no sense: {problem}")
    meta = resource["metadata"]
    with _planning(meta["name"]):
        nodes, pods = cluster.nodes(), cluster.live_pods()
    world = observe(nodes, pods, meta["namespace"], meta["name"], spec.accelerator.resource)
    job = JobRef(name=meta["name"], namespace=meta["namespace"], uid=meta["uid"], generation=meta.get("generation", 0))
    context = Context(job=job, spec=spec, world=world, limits=Timeouts(), now=time.time())
    found = forecast(context, read_status(resource), change)
    return Answer(text=outlook(printable(found)), value=to_wire(found))


@contextlib.contextmanager
def _planning(name: str) -> Iterator[None]:
    """Nodes and the pods of others belong to nobody's namespace: say who can permit it."""
    try:
        yield
    except PluginError as error:
        if "you may not" not in str(error):
            raise
        hint = "bind the chart's ClusterRole ...-planner to whoever plans (docs/install.md, Rights)"
        raise PluginError(error.code, f"{error}; to plan {name}, {hint}") from error


def _steer(cluster: Cluster, options: argparse.Namespace) -> Answer:
    done = steer.ask(cluster, options.verb, options.name)
    if options.wait:
        done = steer.wait(cluster, done, timeout_seconds=options.timeout)
    return Answer(text=printable(done.text), value=to_wire(done))


def _logs(cluster: Cluster, options: argparse.Namespace) -> Answer:
    if options.follow and options.output == "json":
        raise PluginError(Exit.USAGE, "-f prints lines as they come: it cannot be combined with -o json")
    value = logs(cluster, options)
    return Answer(value=value)


_VERBS: Mapping[str, Callable[[Cluster, argparse.Namespace], Answer]] = {
    "list": _list,
    "status": _status,
    "plan": _plan,
    "drain": _steer,
    "suspend": _steer,
    "resume": _steer,
    "retry": _steer,
    "logs": _logs,
}
