"""The table at the beginning of docs/conversions.md says what the matrix behind it says."""

from __future__ import annotations

import re

from tests.pages import ROOT, rows

TEXT = (ROOT / "docs/conversions.md").read_text(encoding="utf-8")
SUMMARY, MATRIX = TEXT.split("\n## The matrix\n")
TARGETS = ("deepspeed", "universal", "dcp", "safetensors", "megatron")
KINDS = {
    "DeepSpeed, ZeRO 0 to 3": r"deepspeed/(bf16|megatron|pipeline|zero)",
    "DeepSpeed with experts": r"deepspeed/(autoep|experts)",
    "DeepSpeed with Muon": r"deepspeed/muon",
    "DeepSpeed, elastic checkpoint": r"deepspeed/elastic",
    "DeepSpeed, universal": r"universal/",
    "torch DCP": r"dcp/",
    "Megatron-Core": r"megatron/",
    "safetensors": r"safetensors/",
    "files of torch.save": r"pytorch/",
}
"""Sources of the table, and how their rows of the matrix begin."""


def matrix() -> tuple[list[str], list[list[str]]]:
    """Formats of the columns, and all rows."""
    lines = MATRIX.split("<!-- end of the matrix -->")[0].splitlines()
    heads = next(line for line in lines if line.startswith("| from |")).strip("|").split("|")[1:]
    return [head.split()[0] for head in heads], rows("\n".join(lines))


def converts(kind: str, target: str, *, like: bool) -> bool:
    """True if a row of this kind has a cell of this target that is not refused."""
    formats, every = matrix()
    found = [
        row
        for row in every
        if re.match(KINDS[kind], row[0]) and ("`--like`" in row[0] or "`--model`" in row[0]) is like
    ]
    assert found or like
    return any(
        cell == "yes" or cell.startswith("one way")
        for row in found
        for at, cell in zip(formats, row[1:], strict=True)
        if at == target
    )


def test_the_table_has_every_kind_of_source_and_of_target() -> None:
    names = [row[0] for row in rows(SUMMARY)]
    assert names == list(KINDS)
    _, every = matrix()
    assert [row[0] for row in every if sum(bool(re.match(kind, row[0])) for kind in KINDS.values()) != 1] == []
    assert set(matrix()[0]) == set(TARGETS)


def test_every_cell_of_the_table_is_what_the_matrix_shows() -> None:
    for kind, *cells in rows(SUMMARY):
        for target, cell in zip(TARGETS, cells, strict=True):
            word = re.split(r"[: ]", cell)[0]
            assert word in ("yes", "with", "no"), (kind, target)
            assert len(cell.partition(": ")[2].split()) <= 6, f"{kind}, {target}: a reason is of a few words"
            assert converts(kind, target, like=False) is (word == "yes"), (kind, target)
            assert word != "no" or not converts(kind, target, like=True), (kind, target)
