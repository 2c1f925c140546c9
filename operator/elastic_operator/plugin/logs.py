"""`kubectl etj logs`: selects a pod, names it on stderr, and prints its log."""

from __future__ import annotations

import argparse
from typing import Any

from elastic_operator.observed.containers import name_main_container
from elastic_operator.observed.observation import pod_view
from elastic_operator.plugin.cluster import Cluster
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.output import write_log_line, write_note
from elastic_operator.plugin.pages.job_report import read_spec, read_status
from elastic_operator.plugin.pages.log_choice import LogQuery, choose_pod, explain_missing_log


def logs(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any] | None:
    """Print the lines of a log as they arrive; with `-o json` and `-o yaml` return them instead.

    Raises:
        PluginError: no pod matches the options, or the pod has no log.
    """
    resource = cluster.job(options.name)
    spec, _ = read_spec(resource)
    pods = cluster.pods(options.name)
    wanted = LogQuery(attempt=options.attempt, index=options.index, rank=options.rank, reshard=options.reshard)
    name = spec.accelerator.resource if spec else ""
    pod = choose_pod(options.name, read_status(resource), [pod_view(item) for item in pods], wanted, name)
    if reason := explain_missing_log(pod):
        raise PluginError(Exit.REFUSED, reason)
    container = name_main_container(next(item for item in pods if item["metadata"]["name"] == pod.name))
    lines = cluster.logs(
        pod.name, container, follow=options.follow, tail_lines=options.tail, timestamps=options.timestamps
    )
    if options.output != "text":
        return {
            "pod": pod.name,
            "container": container,
            "attempt": pod.attempt,
            "index": pod.index,
            "node": pod.node,
            "phase": pod.phase,
            "exitCode": pod.exit_code,
            "lines": list(lines),
        }
    ended = f", exit code {pod.exit_code}" if pod.exit_code is not None else ""
    write_note(f"==> pod {pod.name}, attempt {pod.attempt}, on {pod.node}, {pod.phase}{ended}")
    for line in lines:
        write_log_line(line, raw=options.raw, flush=options.follow)
    return None
