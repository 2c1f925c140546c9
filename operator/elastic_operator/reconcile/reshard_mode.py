"""Choose how an attempt starts from a commit of another topology. Pure.

The training loads a DCP commit by itself (start mode Load), unless a conversion first is asked for or pays. A reshard
Job converts any other commit. Its request says whether to write files or a virtual commit, or leaves the choice to the
resharder: only the resharder knows what a conversion moves (`reshard.virtual.auto_mode`). This module knows what only
the operator knows: whether the training loads virtual commits, which rank 0 writes to its Lease when it restores, and
on which nodes the attempt runs.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec import Spec, spec_hash
from elastic_operator.api.spec_model import AUTO, DCP, LOAD, VIRTUAL
from elastic_operator.api.status import Commit, Current, Resume, StartMode, Status, short
from elastic_operator.observed import commit_history
from elastic_operator.planning.load_cost import estimate_load
from reshard.contract import DCP as DCP_FORMAT
from reshard.contract import ELASTIC_TRAINER, MANIFEST_VERSIONS, VirtualLoader
from reshard.topology import Topology


def choose_start(spec: Spec, status: Status, resume: Resume, topology: Topology) -> tuple[Resume, str]:
    """Let the attempt load its commit without a conversion where that is possible, and preferable.

    Args:
        spec: spec of the job.
        status: status of the job.
        resume: choice of the commit, with a conversion if its topology differs.
        topology: topology of the attempt.

    Returns:
        `resume`, or the same commit with the start mode Load; and one sentence why, empty if there is no choice.
    """
    if spec.checkpoint.format != DCP or resume.mode != StartMode.RESHARD or resume.external:
        return resume, ""
    commit = find_loadable(spec, status, resume)
    if commit is None:
        why = "the format of the commit is not DCP"
        if _loads_own_topology_only(spec, status):
            why = "the elastic_trainer of the training accepts no commit of another topology"
        return resume, f"Start mode Reshard: {why}."
    if spec.reshard.mode == LOAD:
        return load_commit(resume, commit, topology), "Start mode Load: spec.reshard.mode is Load."
    if spec.reshard.mode != AUTO:
        return resume, f"Start mode Reshard: spec.reshard.mode is {spec.reshard.mode}."
    if commit_history.is_conversion_refused(status.checkpoint, step=commit.step):
        why = "a converted commit of this step could not be loaded"
        return load_commit(resume, commit, topology), f"Start mode Load: {why}."
    estimate = estimate_load(commit.num_bytes, commit.topology, topology)
    if estimate.is_conversion_faster:
        return resume, f"Start mode Reshard: {estimate}."
    return load_commit(resume, commit, topology), f"Start mode Load: {estimate}."


def find_loadable(spec: Spec, status: Status, resume: Resume) -> Commit | None:
    """Return the source of a conversion if the training can load it without one; None if it cannot.

    The commit must say itself that its format is DCP. The training may have said that it accepts no such commit; as
    long as it has said nothing, it is believed to accept it.
    """
    commit = next((item for item in status.checkpoint.history if item.uri == resume.source), None)
    if spec.checkpoint.format != DCP or resume.external or commit is None or commit.format != DCP_FORMAT:
        return None
    return None if _loads_own_topology_only(spec, status) else commit


def _loads_own_topology_only(spec: Spec, status: Status) -> bool:
    """Return whether an attempt of this spec has said that it accepts no DCP commit of another topology."""
    loader = status.loader
    return loader is not None and loader.spec_hash == spec_hash(spec) and DCP_FORMAT not in loader.formats


def is_topology_refused(current: Current, loader: VirtualLoader | None) -> bool:
    """Return whether an attempt refused its commit because its elastic_trainer is older than start mode Load.

    Such a commit is not damaged: the next attempt has it converted.
    """
    return current.resume.mode == StartMode.LOAD and loader is not None and DCP_FORMAT not in loader.formats


def load_commit(resume: Resume, commit: Commit, topology: Topology) -> Resume:
    """Return the start from `commit` without a conversion."""
    reason = f"step {commit.step} of attempt {commit.attempt} ({short(commit.topology)}), loaded as {short(topology)}"
    return dataclasses.replace(resume, uri=commit.uri, ready=True, mode=StartMode.LOAD, reason=reason)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """Arguments of the reshard Job, and why it writes files.

    Attributes:
        arguments: for `reshard run`; none for files.
        reason: why the operator requests files; empty if it does not.
    """

    arguments: tuple[str, ...] = ()
    reason: str = ""


def conversion_request(spec: Spec, status: Status, current: Current) -> ConversionRequest:
    """Choose the mode of the conversion that `current` waits for."""
    if current.resume.external:
        return ConversionRequest(reason="the owner of the start checkpoint may remove it: files")
    if spec.checkpoint.format == DCP:
        return ConversionRequest(reason="a rank may open any file of a DCP commit, so there is no virtual one: files")
    if commit_history.is_conversion_refused(status.checkpoint, step=current.resume.step):
        return ConversionRequest(
            reason="a virtual commit of this step could not be loaded: files show whether its source is readable"
        )
    if spec.reshard.mode == VIRTUAL:
        return ConversionRequest(arguments=("--mode", "virtual"))
    if spec.reshard.mode != AUTO:
        return ConversionRequest(reason="spec.reshard.mode is Materialize")
    obstacle = _find_obstacle(spec, status, current)
    if obstacle or status.loader is None:
        return ConversionRequest(reason=f"Auto writes files: {obstacle}")
    loader = f"{ELASTIC_TRAINER},ranks-per-node={current.gpus_per_node},node-memory={status.loader.memory_bytes}"
    return ConversionRequest(arguments=("--loader", loader))


def _find_obstacle(spec: Spec, status: Status, current: Current) -> str:
    """Return why the operator does not leave the choice to the resharder, empty if it does."""
    loader = status.loader
    if spec.reshard.parallelism > 1:
        return "spec.reshard.parallelism shares them among pods"
    if spec.reshard.template is not None:
        return "the image of spec.reshard.template may be older than the choice"
    if loader is None:
        return "no attempt has said yet that it restores through elastic_trainer"
    if loader.spec_hash != current.spec_hash:
        return "no attempt of the edited spec has said yet that it restores through elastic_trainer"
    if MANIFEST_VERSIONS[-1] not in loader.manifests:
        versions = ", ".join(map(str, loader.manifests))
        return f"the training reads manifests of versions {versions}, the resharder writes {MANIFEST_VERSIONS[-1]}"
    return ""
