"""How the next conversion is asked for: files, a virtual commit, or what the resharder finds cheaper. Pure.

The resharder alone knows what a conversion moves, and chooses (`reshard.virtual.auto_mode`). Here is what only the
operator knows: whether the training loads virtual commits at all, which it says on its Lease as it restores, and on
what nodes.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec import Spec
from elastic_operator.api.spec_types import AUTO, VIRTUAL
from elastic_operator.api.status import Current, Status
from elastic_operator.observed import commit_history
from reshard.contract import ELASTIC_TRAINER, MANIFEST_VERSIONS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """What the reshard Job is asked for.

    Attributes:
        arguments: for `reshard run`; none for files.
        reason: why it is files, where that is decided here.
    """

    arguments: tuple[str, ...] = ()
    reason: str = ""


def conversion_request(spec: Spec, status: Status, current: Current) -> ConversionRequest:
    """The mode of the conversion that `current` waits for."""
    if current.resume.external:
        return ConversionRequest(reason="others may remove what the job starts from: files")
    if commit_history.virtual_was_refused(status.checkpoint, step=current.resume.step):
        return ConversionRequest(reason="a conversion of this step could not be loaded: files prove its source or not")
    if spec.reshard.mode == VIRTUAL:
        return ConversionRequest(arguments=("--mode", "virtual"))
    if spec.reshard.mode != AUTO:
        return ConversionRequest(reason="spec.reshard.mode is Materialize")
    why = _obstacle(spec, status, current)
    if why or status.loader is None:
        return ConversionRequest(reason=f"Auto writes files: {why}")
    loader = f"{ELASTIC_TRAINER},ranks-per-node={current.gpus_per_node},node-memory={status.loader.memory_bytes}"
    return ConversionRequest(arguments=("--loader", loader))


def _obstacle(spec: Spec, status: Status, current: Current) -> str:
    """Why the choice is not left to the resharder, or nothing."""
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
        known = ", ".join(map(str, loader.manifests))
        return f"the training reads manifests of versions {known}, the resharder writes {MANIFEST_VERSIONS[-1]}"
    return ""
