"""Implementation of the verbs: each returns text for people and an object for machines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_operator.api.serialization import to_wire
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin import steer
from elastic_operator.plugin.cluster import Cluster
from elastic_operator.plugin.convert.command import convert_files
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.live import watch
from elastic_operator.plugin.logs import logs
from elastic_operator.plugin.options import find_version
from elastic_operator.plugin.pages.forecast import make_forecast
from elastic_operator.plugin.pages.job_report import is_about, make_report, read_spec, read_status
from elastic_operator.plugin.pages.listing import format_listing, make_entry
from elastic_operator.plugin.pages.live.losses import Sample, read_recording
from elastic_operator.plugin.pages.plan_page import format_plan
from elastic_operator.plugin.pages.report.html_page import write_html
from elastic_operator.plugin.pages.report.markdown import write_markdown
from elastic_operator.plugin.pages.report.story import make_story
from elastic_operator.plugin.pages.status_page import format_status
from elastic_operator.plugin.pages.text import make_printable
from elastic_operator.plugin.pages.usage import format_usage, measure_usage, sort_usage
from elastic_operator.plugin.pages.whatif import Change, observe, parse_lose
from elastic_operator.plugin.pages.why import explain, format_explanation
from elastic_operator.reconcile.context import Context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Output of a verb.

    Attributes:
        text: printed on stdout, unless `-o json` or `-o yaml` is given.
        value: printed on stdout with `-o json` or `-o yaml`.
        note: printed on stderr.
    """

    text: str = ""
    value: Any = None
    note: str = ""


def run(cluster: Cluster, options: argparse.Namespace) -> Answer:
    """Run the verb of the command line.

    Raises:
        PluginError: the verb failed.
    """
    return _VERBS[options.verb](cluster, options)


def _list(cluster: Cluster, options: argparse.Namespace) -> Answer:
    now = time.time()
    entries = [make_entry(make_report(item, now)) for item in cluster.jobs(everywhere=options.all_namespaces)]
    value = {"items": [to_wire(item) for item in entries]}
    if not entries:
        return Answer(value=value, note=_no_jobs(cluster, options))
    return Answer(text=format_listing(make_printable(entries), now, everywhere=options.all_namespaces), value=value)


def _top(cluster: Cluster, options: argparse.Namespace) -> Answer:
    now = time.time()
    items = [measure_usage(item, now) for item in cluster.jobs(everywhere=options.all_namespaces)]
    items = sort_usage(items, options.sort)
    value = {"items": [to_wire(item) for item in items]}
    if not items:
        return Answer(value=value, note=_no_jobs(cluster, options))
    return Answer(text=format_usage(make_printable(items), everywhere=options.all_namespaces), value=value)


def _no_jobs(cluster: Cluster, options: argparse.Namespace) -> str:
    where = "" if options.all_namespaces else f" in {cluster.namespace} namespace"
    return f"No ElasticTrainingJobs found{where}."


def _status(cluster: Cluster, options: argparse.Namespace) -> Answer:
    resource, note = cluster.job(options.name), ""
    events: list[dict[str, Any]] = []
    try:
        events = cluster.events(options.name)
    except PluginError as error:
        note = f"without events: {error}"
    now = time.time()
    job = make_report(resource, now, [item for item in events if is_about(item, resource)])
    return Answer(
        text=format_status(make_printable(job), now, max_events=options.events), value=to_wire(job), note=note
    )


def _why(cluster: Cluster, options: argparse.Namespace) -> Answer:
    now = time.time()
    found = explain(cluster.job(options.name), now)
    return Answer(text=format_explanation(make_printable(found), now), value=to_wire(found))


def _watch(cluster: Cluster, options: argparse.Namespace) -> Answer:
    if options.output == "yaml":
        raise PluginError(Exit.USAGE, "watch prints one JSON object a line: it cannot be combined with -o yaml")
    watch(cluster, options)
    return Answer()


def _report(cluster: Cluster, options: argparse.Namespace) -> Answer:
    samples, num_unusable = _read_history(options.history)
    resource, note = cluster.job(options.name), ""
    events: list[dict[str, Any]] = []
    try:
        events = [item for item in cluster.events(options.name) if is_about(item, resource)]
    except PluginError as error:
        note = f"without events: {error}"
    story = make_story(resource, events, time.time(), samples=samples, num_unusable=num_unusable)
    write = write_html if options.output == "html" else write_markdown
    return Answer(text=write(story, find_version()), value=to_wire(story), note=note)


def _read_history(path: Path | None) -> tuple[tuple[Sample, ...], int]:
    if path is None:
        return (), 0
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return read_recording(lines)
    except OSError as error:
        raise PluginError(Exit.REFUSED, f"cannot read {path}: {error.strerror}") from error


def _plan(cluster: Cluster, options: argparse.Namespace) -> Answer:
    try:
        lose = parse_lose(name for group in options.lose for name in group)
    except ValueError as error:
        raise PluginError(Exit.USAGE, f"--lose {error}") from error
    change = Change(lose=lose, num_gpus=options.gpus, add_nodes=options.add)
    resource = cluster.job(options.name)
    spec, problem = read_spec(resource)
    if spec is None:
        raise PluginError(Exit.REFUSED, f"{options.name} cannot be planned, because its spec is invalid: {problem}")
    meta = resource["metadata"]
    with _permission_hint(meta["name"]):
        nodes, pods = cluster.nodes(), cluster.live_pods()
    world = observe(nodes, pods, meta["namespace"], meta["name"], spec.accelerator.resource)
    job = JobRef(name=meta["name"], namespace=meta["namespace"], uid=meta["uid"], generation=meta.get("generation", 0))
    context = Context(job=job, spec=spec, world=world, limits=Timeouts(), now=time.time())
    result = make_forecast(context, read_status(resource), change)
    return Answer(text=format_plan(make_printable(result)), value=to_wire(result))


@contextlib.contextmanager
def _permission_hint(name: str) -> Iterator[None]:
    """Add to a permission error which ClusterRole permits to list nodes and the pods of all namespaces."""
    try:
        yield
    except PluginError as error:
        if "you may not" not in str(error):
            raise
        hint = "bind the chart's ClusterRole ...-planner to whoever plans (docs/install.md, Rights)"
        raise PluginError(error.code, f"{error}; to plan {name}, {hint}") from error


def _steer(cluster: Cluster, options: argparse.Namespace) -> Answer:
    done = steer.send_request(cluster, options.verb, options.name)
    if options.wait:
        done = steer.wait_until_done(cluster, done, timeout_seconds=options.timeout)
    return Answer(text=make_printable(done.text), value=to_wire(done))


def _logs(cluster: Cluster, options: argparse.Namespace) -> Answer:
    if options.follow and options.output != "text":
        raise PluginError(Exit.USAGE, f"-f prints lines as they come: it cannot be combined with -o {options.output}")
    value = logs(cluster, options)
    return Answer(value=value)


def _convert(options: argparse.Namespace) -> Answer:
    text, job = convert_files(options)
    return Answer(text=text, value=job)


LOCAL_VERBS: Mapping[str, Callable[[argparse.Namespace], Answer]] = {"convert": _convert}
"""Verbs that need no cluster."""

_VERBS: Mapping[str, Callable[[Cluster, argparse.Namespace], Answer]] = {
    "list": _list,
    "top": _top,
    "status": _status,
    "watch": _watch,
    "why": _why,
    "report": _report,
    "plan": _plan,
    "drain": _steer,
    "suspend": _steer,
    "resume": _steer,
    "retry": _steer,
    "logs": _logs,
}
