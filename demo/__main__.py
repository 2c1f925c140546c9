"""`make demo`: train on three nodes, kill one, go on with two, get it back, finish, and prove that nothing was lost."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

from demo import manifests
from demo.curves import Comparison, compare, read_points
from demo.kube import DemoError, Kube, cluster, wait_for
from demo.options import JOB, LAUNCH, NAMESPACE, parse
from demo.picture import draw
from demo.release import operator
from demo.timeline import Timeline
from reshard.topology import Topology
from testbed.errors import TestbedError


def main() -> int:
    """Exit code 0 only if every step of the story happened and every loss agrees with the reference."""
    options = parse()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    kube = Kube(options)
    timeline = Timeline(fetch=lambda: kube.get("etj", JOB), fetch_events=lambda: events(kube))
    try:
        with cluster(kube):
            timeline.say("helm install")
            with operator(options, kube) as installed:
                kube.prepare()
                timeline.alive = installed.alive
                story(options, kube, timeline)
        timeline.say("running the same training undisturbed, as reference")
        reference(options, timeline)
    except (DemoError, TestbedError) as error:
        timeline.stop()
        sys.stderr.write(f"demo: {error}\ndemo: see {options.output}/operator.log\n")
        return 1
    return judge(options, timeline)


def story(options: argparse.Namespace, kube: Kube, timeline: Timeline) -> None:
    """Run the demo's events on the job, one after the other."""
    job = manifests.job(options, kube.machine)
    timeline.restart_clock()
    kube.apply(job)
    timeline.say(">>>>> kubectl apply")
    timeline.start()
    try:
        step = wait_for_step(timeline, attempt=1, step=options.kill_at, needs_commit=True)
        victim = kube.node_of(1, 0)
        kube.kill(victim)
        timeline.mark(f"{victim} loses power at step {step} (it ran rank 0)")
        second = wait_for_attempt(timeline, after=1)
        wait_for_step(timeline, attempt=second, step=0)
        resumed = timeline.now() - timeline.marks[-1].time
        timeline.say(f"{'':<11} training again {resumed:.1f} s after the power loss")
        wait_for_step(timeline, attempt=second, step=status_step(timeline) + 15)
        kube.heal(victim)
        timeline.mark(f"{victim} is back")
        third = wait_for_attempt(timeline, after=second)
        wait_for_step(timeline, attempt=third, step=0)
        wait_for(
            lambda: timeline.status.get("phase") in ("Complete", "Failed"),
            what="the end of the job",
            timeout_seconds=600,
        )
    finally:
        timeline.stop()
        (options.output / "job.json").write_text(json.dumps(timeline.job, indent=1))
        kube.loss_logs(job["spec"]["checkpoint"]["path"], options.output / "losses")
    if timeline.status.get("phase") != "Complete":
        raise DemoError(f"the job ended as {timeline.status.get('phase')}: {timeline.status.get('message')}")


def status_step(timeline: Timeline) -> int:
    """Newest step that the status shows."""
    return int((timeline.status.get("progress") or {}).get("step") or 0)


def wait_for_step(timeline: Timeline, *, attempt: int, step: int, needs_commit: bool = False) -> int:
    """Wait until the attempt trains and has done `step` steps in all."""

    def reached() -> int:
        status = timeline.status
        check(timeline)
        running = status.get("attempt") == attempt and status.get("phase") == "Running"
        committed = not needs_commit or (status.get("checkpoint") or {}).get("step")
        return status_step(timeline) if running and committed and status_step(timeline) >= step else 0

    return int(wait_for(reached, what=f"step {step} of attempt {attempt}", timeout_seconds=300))


def check(timeline: Timeline) -> None:
    """Give up at once where waiting is pointless.

    Raises:
        DemoError: the job has failed, or no operator is there.
    """
    if timeline.status.get("phase") == "Failed":
        raise DemoError(f"the job failed: {timeline.status.get('message')}")
    if not timeline.alive():
        raise DemoError("no replica of the operator is ready")


def wait_for_attempt(timeline: Timeline, *, after: int) -> int:
    """Wait for a later attempt to train; attempts that were planned and never launched leave gaps."""

    def running() -> int:
        check(timeline)
        status = timeline.status
        found = int(status.get("attempt") or 0)
        return found if found > after and status.get("phase") == "Running" else 0

    return int(wait_for(running, what=f"an attempt after {after}", timeout_seconds=300))


def events(kube: Kube) -> list[tuple[str, str, str]]:
    """The job's events, oldest first."""
    items = kube.get("events", "--field-selector", f"involvedObject.name={JOB}").get("items", [])
    items.sort(key=lambda item: item.get("eventTime") or item.get("lastTimestamp") or "")
    return [(item["metadata"]["uid"], item.get("reason", ""), item.get("message", "")) for item in items]


def reference(options: argparse.Namespace, timeline: Timeline) -> None:
    """Train the same steps in the first attempt's topology, without a cluster and without faults."""
    spec: dict[str, Any] = timeline.job["spec"]
    zero = spec.get("parallelism", {}).get("zeroStage", 1)
    topology = Topology.parse(f"{timeline.topologies[1]},zero={zero}")
    folder = options.output / "reference"
    shutil.rmtree(folder, ignore_errors=True)
    environment = {
        **os.environ,
        "ETJ_TOPOLOGY": str(topology),
        "ETJ_GLOBAL_BATCH": str(spec["batch"]["globalSamples"]),
        "ETJ_MICRO_BATCH": str(spec["batch"]["microSamples"]),
        "ETJ_CHECKPOINT_ROOT": str(folder.absolute()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = str(manifests.ROOT / "examples/gpt_deepspeed/train.py")
    command = [*LAUNCH, "--nproc", str(topology.world_size), script]
    with open(options.output / "reference.log", "wb") as log:
        code = subprocess.run(
            [*command, "--steps", str(options.steps)], env=environment, stdout=log, stderr=log, check=False
        ).returncode
    if code:
        raise DemoError(f"the reference run ended with {code}: see {options.output}/reference.log")


def judge(options: argparse.Namespace, timeline: Timeline) -> int:
    """Compare, draw, write the report; 0 if everything agrees."""
    elastic = read_points(options.output / "losses")
    undisturbed = read_points(options.output / "reference")[1]
    result = compare(elastic, undisturbed, relative_tolerance=options.tolerance, num_steps=options.steps)
    topologies = {attempt: text for attempt, text in timeline.topologies.items() if attempt in elastic}
    draw(
        options.picture,
        elastic=elastic,
        reference=undisturbed,
        topologies=topologies,
        spans=timeline.spans,
        marks=timeline.marks,
        subtitle=f"{' -> '.join(topologies.values())}; {platform_of(options)}, real DeepSpeed (CPU, fp32)",
    )
    report = options.output / "report.json"
    report.write_text(json.dumps(report_of(options, timeline, result), indent=1))
    for attempt, count in result.num_compared.items():
        timeline.say(
            f"attempt {attempt} ({topologies.get(attempt, '?')}): {count} steps, "
            f"largest difference {result.largest_relative[attempt]:.1e} relative"
        )
    for item in result.disagreements[:5]:
        timeline.say(f"DISAGREES: {item}")
    if result.missing:
        timeline.say(f"MISSING steps: {list(result.missing)[:10]}")
    ok = result.ok and len(elastic) >= 3 and len(set(topologies.values())) >= 2
    timeline.say(f"{'the loss curves agree' if ok else 'FAILED'}; picture {options.picture}, report {report}")
    return 0 if ok else 1


def platform_of(options: argparse.Namespace) -> str:
    """Say in the picture what the job ran on."""
    on_kind = options.cluster == "kind" and not options.kubeconfig
    return f"{options.resource}, {'Kubernetes on kind' if on_kind else 'real Kubernetes'}"


def report_of(options: argparse.Namespace, timeline: Timeline, result: Comparison) -> dict[str, Any]:
    """Return all observations as values for JSON."""
    status = timeline.status
    return {
        "ok": result.ok,
        "machine": {"platform": platform.platform(), "processors": os.cpu_count()},
        "steps": options.steps,
        "tolerance": options.tolerance,
        "largest_relative_difference": {str(key): value for key, value in result.largest_relative.items()},
        "compared_steps": {str(key): value for key, value in result.num_compared.items()},
        "topologies": {str(key): value for key, value in timeline.topologies.items()},
        "phases": [
            {"phase": span.phase, "attempt": span.attempt, "start": round(span.start, 2), "end": round(span.end, 2)}
            for span in timeline.spans
        ],
        "marks": [{"time": round(mark.time, 2), "text": mark.text} for mark in timeline.marks],
        "recoveries": status.get("recoveries", []),
        "reshard": status.get("reshard", {}),
        "goodput": status.get("goodput", {}),
        "namespace": NAMESPACE,
    }


if __name__ == "__main__":
    sys.exit(main())
