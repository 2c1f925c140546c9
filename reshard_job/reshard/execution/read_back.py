"""Read a finished result back before it is published: the positions of its tensors, and on request all tensors."""

from __future__ import annotations

from pathlib import Path

from reshard.checksums.digest import finish_digest, to_hex
from reshard.commits.commit import Commit
from reshard.errors import SourceError, UnsupportedError, VerificationError
from reshard.execution.placement import check_placement
from reshard.execution.verify import compare_digests, read_digests
from reshard.folders import read_checkpoint
from reshard.planning.plan import Plan
from reshard.profile.collector import timed
from reshard.tensors.layout import PADDING


@timed("read back")
def read_back(staging: Path, plan: Plan, commit: Commit, *, reread: bool) -> None:
    """Read a result through its format's reader and compare it with the plan.

    Every failure is raised as a VerificationError, because it is a fault of the target and not of the source.

    Args:
        staging: folder of the finished files.
        plan: plan of the conversion.
        commit: commit that will be published.
        reread: read all tensors too, not only their positions.

    Raises:
        VerificationError: a tensor is not where a reader looks for it, or reads back differently.
    """
    try:
        index = read_checkpoint(staging, commit)
        check_placement(plan, index)
        if not reread:
            return
        actual = read_digests(index, commit=commit)
        # Padding of another size than the source's was not converted: it is zero and has no committed digest.
        padding = {str(tensor.key): tensor.num_bytes for tensor in index.tensors if tensor.key.name.endswith(PADDING)}
        zero = {key for key, count in padding.items() if actual[key] == to_hex(finish_digest(0, count))}
        compare_digests(
            commit.digests, {key: actual[key] for key in actual if key in commit.digests or key not in zero}
        )
    except (SourceError, UnsupportedError) as error:
        raise VerificationError(
            f"what was written reads back differently: nothing was published ({error.message})",
            path=str(staging),
            problems=error.problems,
        ) from error
