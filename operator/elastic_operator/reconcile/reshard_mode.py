"""Choose how to request the next conversion: files, a virtual commit, or the resharder's own choice. Pure.

Only the resharder knows what a conversion moves, and it chooses (`reshard.virtual.auto_mode`). This module knows what
only the operator knows: whether the training loads virtual commits, which rank 0 writes to its Lease when it restores,
and on which nodes the attempt runs.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec import Spec
from elastic_operator.api.spec_model import AUTO, VIRTUAL
from elastic_operator.api.status import Current, Status
from elastic_operator.observed import commit_history
from reshard.contract import ELASTIC_TRAINER, MANIFEST_VERSIONS


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
    if commit_history.is_virtual_refused(status.checkpoint, step=current.resume.step):
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
