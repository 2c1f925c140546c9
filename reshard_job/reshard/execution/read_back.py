"""Read a finished result back before it is published: where its tensors are, and all of it where that is asked for."""

from __future__ import annotations

from pathlib import Path

from reshard.checksums.digest import finished, to_hex
from reshard.commits.commit import Commit
from reshard.errors import SourceError, VerificationError
from reshard.execution.placement import check_placement
from reshard.execution.verify import compare_digests, digests
from reshard.formats import read_checkpoint
from reshard.planning.plan import Plan
from reshard.tensors.layout import PADDING


def read_back(staging: Path, plan: Plan, commit: Commit, *, reread: bool) -> None:
    """Read a result as any reader would; what is wrong with it is the target's fault, never the source's.

    Args:
        staging: folder of the finished files.
        plan: what was written.
        commit: that would be published.
        reread: read all tensors, and not only where they are.

    Raises:
        VerificationError: a tensor is not where a reader looks for it, or reads back differently.
    """
    try:
        index = read_checkpoint(staging, commit)
        check_placement(plan, index)
        if not reread:
            return
        found = digests(index, commit=commit)
        # Another amount of padding than the source's was not converted: it is zero.
        padding = {str(tensor.key): tensor.num_bytes for tensor in index.tensors if tensor.key.name.endswith(PADDING)}
        zero = {key for key, count in padding.items() if found[key] == to_hex(finished(0, count))}
        compare_digests(commit.digests, {key: found[key] for key in found if key in commit.digests or key not in zero})
    except SourceError as error:
        raise VerificationError(
            f"what was written reads back differently: nothing was published ({error.message})",
            path=str(staging),
            problems=error.problems,
        ) from error
