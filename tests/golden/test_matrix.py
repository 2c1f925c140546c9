"""Every golden checkpoint into every format and layout: converted and the same, or refused as docs/conversions.md says.

What a cell is: `tests.golden.matrix`. Any other end of a conversion than these fails here.
"""

import re

import pytest

from reshard.api import Conversion, Hooks, RunOptions, convert, index_of
from reshard.commits.commit import read_commit
from reshard.errors import VerificationError
from reshard.topology import Topology
from tests.golden import matrix
from tests.golden.files import STEP, golden
from tests.golden.universal_files import converted
from tests.randomness import some

CHOSEN: dict[str, list[matrix.Target]] = {}
for _name, _target in some([(name, target) for name in matrix.SOURCES for target in matrix.TARGETS], every=7):
    CHOSEN.setdefault(_name, []).append(_target)
"""Targets of each source: `make test` takes two or three of them, in turn, and a soak takes all."""


@pytest.fixture(scope="module")
def page() -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """Heads of the page's table, its rows by name, and its refusals by number."""
    text = matrix.on_page()
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line] for line in lines]
    refusals = dict(re.findall(r"^(\d+)\. (.+)$", text, flags=re.MULTILINE))
    return heads[1:], {name: cells for name, *cells in rows}, refusals


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_every_target_is_the_same_or_refused_as_the_page_says(name, page):
    heads, rows, refusals = page
    assert heads == [target.title for target in matrix.TARGETS]
    for target in CHOSEN[name]:
        told, cell = rows[name][matrix.TARGETS.index(target)], matrix.cell(name, target)
        word, _, number = told.rpartition(" ")
        expected = {"no": "", "one way": ""} | {word: refusals.get(number, "")}
        assert (cell.refused, cell.back) == (expected["no"], expected["one way"]), (target.title, told)
        assert cell.refused or cell.compared > 0
        assert cell.refused or cell.back or cell.same_back > 0


def test_every_source_and_every_target_is_chosen():
    assert set(CHOSEN) == set(matrix.SOURCES)
    assert {target for targets in CHOSEN.values() for target in targets} == set(matrix.TARGETS)


def test_the_page_has_the_rows_and_refusals_that_there_are(page):
    _, rows, refusals = page
    assert list(rows) == list(matrix.SOURCES)
    used = {int(number) for number in re.findall(r"(?:no|one way) (\d+) \|", matrix.on_page())}
    assert used == set(map(int, refusals)) == set(range(1, len(refusals) + 1))


def test_optimizer_state_comes_back_through_other_formats():
    """Else a format that drops the moments would pass: what both hold is equal."""
    index, _ = matrix.source_of("deepspeed/zero2-dp3")
    targets = matrix.Target(format="dcp", topology="dp=3"), matrix.Target(format="universal", topology="zero=1")
    num_tensors = {target.format: matrix.cell("deepspeed/zero2-dp3", target).same_back for target in targets}
    wanted = sum(tensor.key.state in ("exp_avg", "exp_avg_sq", "fp32") for tensor in index.tensors)
    assert wanted == 21
    assert num_tensors["dcp"] >= wanted
    assert num_tensors["universal"] >= wanted


def test_one_wrong_element_would_be_found():
    """A control of the comparison."""
    index, found = matrix.source_of("deepspeed/zero2-dp3")
    spoiled = {**found, "exp_avg/up.weight": "0" * 16}
    with pytest.raises(AssertionError, match=r"exp_avg/up\.weight"):
        matrix.agreeing((index, found), (index, spoiled))


@pytest.mark.parametrize("topology", ["dp=3", "tp=2,pp=2"])
def test_padding_rows_that_the_source_lacks_are_zero_and_noted(tmp_path, topology):
    """A folder of DeepSpeed's own converter has the vocabulary's true size; what is read back is more than was."""
    source = converted("pipeline-tp2-pp2")
    wanted = Conversion(
        source=source,
        target=tmp_path / STEP,
        topology=Topology.parse(topology),
        target_format="deepspeed",
        like=golden("pipeline-tp2-pp2"),
    )
    plans = []
    convert(wanted, RunOptions(reread=True, sync=False), hooks=Hooks(on_plan=plans.append))
    (note,) = [note for note in plans[0].layout.notes if "padding" in note]
    assert note == "padding rows of tied_modules.embed.weight are zero: the source does not hold them"
    (row,) = [t for t in index_of(wanted.target).tensors if str(t.key) == "fp32/tied_modules.embed.weight#padding"]
    assert row.shape == (3, 8)
    assert str(row.key) not in read_commit(wanted.target).digests


@pytest.mark.parametrize("target_format", ["deepspeed", "universal"])
def test_padding_rows_that_a_way_over_dcp_lost_are_noted_on_both_ways(tmp_path, target_format):
    there = Conversion(
        source=golden("pipeline-tp2-pp2"), target=tmp_path / "dcp", topology=Topology(dp=2), target_format="dcp"
    )
    plans = []
    convert(there, RunOptions(sync=False), hooks=Hooks(on_plan=plans.append))
    assert any("padding rows of tied_modules.embed.weight are left behind" in note for note in plans[0].layout.notes)
    back = Conversion(
        source=tmp_path / "dcp",
        target=tmp_path / STEP,
        topology=Topology(tp=2),
        target_format=target_format,
        like=golden("pipeline-tp2-pp2"),
    )
    convert(back, RunOptions(sync=False), hooks=Hooks(on_plan=plans.append))
    note = "padding rows of tied_modules.embed.weight are zero: the source does not hold them"
    assert note in plans[1].layout.notes


def test_padding_rows_that_are_not_zero_are_not_accepted(tmp_path, monkeypatch):
    """Only zeros may be there that were not in the source."""
    wanted = Conversion(
        source=converted("pipeline-tp2-pp2"),
        target=tmp_path / STEP,
        topology=Topology(tp=2, pp=2),
        target_format="deepspeed",
        like=golden("pipeline-tp2-pp2"),
    )
    name = "exp_avg/tied_modules.embed.weight#padding"
    real = matrix.read_digests
    monkeypatch.setattr(
        "reshard.execution.read_back.read_digests", lambda index, **options: {**real(index, **options), name: "1" * 16}
    )
    with pytest.raises(VerificationError, match=f"{name}: only in the second"):
        convert(wanted, RunOptions(reread=True, sync=False))
    assert not wanted.target.exists()
