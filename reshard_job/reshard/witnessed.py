"""Call the witness of a conversion: it reads the source while the bytes move, and compares when the files are there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard.commits.commit import Commit, read_commit
from reshard.conversion import Conversion
from reshard.errors import SourceError
from reshard.folders import unwrap
from reshard.planning.plan import Plan
from reshard.system.companion import Companion

if TYPE_CHECKING:
    from reshard.witness import Seen

Files: TypeAlias = Mapping[str, int | None]
"""Path of every file of a target -> its CRC-32 as it was written."""

Witness: TypeAlias = "Companion[Seen, Files, dict[str, Any]]"
"""Answers with what COMMIT.json states of the comparison."""


def witness_of(plan: Plan, conversion: Conversion, folder: Path) -> Witness:
    """Return a witness that knows nothing of a plan but where source and target are, and what was asked for.

    The functions import the witness when they run: in the process that is forked for them, or when all bytes are moved.

    Args:
        plan: plan of the conversion.
        conversion: what to convert.
        folder: folder of the unfinished result.
    """
    source_model: Mapping[str, Any] = {}
    with contextlib.suppress(SourceError):
        source_model = dict(read_commit(plan.index.root).model)

    def prepare() -> Seen:
        from reshard.witness import Case, see_source

        return see_source(
            Case(
                source=unwrap(plan.index).root,
                source_format=plan.index.format,
                source_model=source_model,
                target=folder / plan.layout.folder,
                target_format=plan.layout.format,
                target_model=plan.layout.model,
                states=conversion.states,
                names=conversion.names,
                patterns=conversion.patterns,
                weight_dtype=conversion.weight_dtype,
                allow_differences=conversion.allow_differences,
            )
        )

    def answer(seen: Seen, files: Files) -> dict[str, Any]:
        from reshard.witness import compare

        return compare(seen, files).to_dict()

    return Companion(prepare, answer)


def ask(witness: Witness, commit: Commit, plan: Plan) -> None:
    """Let a witness compare the finished files that a commit names."""
    prefix = f"{plan.layout.folder}/" if plan.layout.folder else ""
    inside = tuple(f"{part}/" for part in plan.layout.parts) or prefix
    witness.ask({file.path.removeprefix(prefix): file.crc32 for file in commit.files if file.path.startswith(inside)})
