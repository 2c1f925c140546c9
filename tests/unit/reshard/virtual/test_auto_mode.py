"""Choices of `--mode auto`: one table of measured cases, promised cases, and borders."""

import dataclasses

import pytest

from reshard.errors import UsageError
from reshard.virtual.auto_mode import LEAST_SAVING_SECONDS, Loader, Needs, choose, parse_loader

GB, TB = 10**9, 10**12


def needs(total, nodes, *, amplified=1.0):
    """A checkpoint of `total` bytes; nodes need so much more of the source than their files hold."""
    each = total // nodes
    return Needs(
        read=total,
        write=total,
        node_source=int(each * amplified),
        node_files=each,
        all_source=int(total * amplified),
        all_files=total,
    )


@pytest.mark.parametrize(
    ("case", "checkpoint", "loads", "mode"),
    [
        ("a laptop's checkpoint: seconds either way", needs(GB, 1), 1, "materialize"),
        ("small, whoever loads it", needs(15 * 10**6, 2), 1, "materialize"),
        ("one node of eight accelerators", needs(100 * GB, 1), 1, "virtual"),
        ("many nodes make their files side by side", needs(2 * TB, 32), 1, "virtual"),
        ("loaded so often on one node that files are cheaper", needs(100 * GB, 1), 6, "materialize"),
        ("loaded as often on many nodes, which share the work", needs(2 * TB, 32), 6, "virtual"),
        ("fp32 read for bfloat16 weights on every node", needs(100 * GB, 4, amplified=2.0), 1, "virtual"),
        ("every node reads far more than it loads", needs(100 * GB, 4, amplified=4.0), 1, "materialize"),
    ],
)
def test_the_cheaper_way_is_chosen(case, checkpoint, loads, mode):
    loader = Loader(ranks_per_node=8, memory_bytes=2 * TB, num_loads=loads)
    found = choose(loader, checkpoint)
    assert found.mode == mode, (case, found.reason)
    assert "to load virtually" in found.reason


def test_a_saving_counts_from_the_least_that_is_worth_a_dependency():
    loader, last = Loader(ranks_per_node=1, memory_bytes=TB), "materialize"
    for total in range(0, 3 * GB, GB // 50):
        found = choose(loader, needs(total, 1)).mode
        assert (last, found) != ("virtual", "materialize")
        last = found
    # Written: read, make, write and read again, 7 s per GB; virtual: read and make, 3 s per GB.
    assert choose(loader, needs(int(LEAST_SAVING_SECONDS / 4 * GB) + GB // 100, 1)).mode == "virtual"
    assert choose(loader, needs(int(LEAST_SAVING_SECONDS / 4 * GB) - GB // 100, 1)).mode == "materialize"


@pytest.mark.parametrize(("free", "mode"), [(200 * GB, "virtual"), (200 * GB - 1, "materialize"), (0, "materialize")])
def test_the_files_and_what_is_made_of_them_must_fit_into_a_nodes_memory(free, mode):
    found = choose(Loader(ranks_per_node=8, memory_bytes=free), needs(400 * GB, 4))
    assert found.mode == mode
    if mode == "materialize":
        assert "of a node's memory for the files of its 8 ranks" in found.reason


def test_nobody_known_to_load_it_gets_files():
    assert choose(None, needs(TB, 8)).mode == "materialize"
    assert "any unmodified framework loads the files" in choose(None, needs(TB, 8)).reason


def test_what_cannot_be_virtual_is_not():
    loader = Loader(ranks_per_node=8, memory_bytes=TB)
    assert dataclasses.astuple(choose(loader, needs(TB, 8), "no: it is a pear")) == ("materialize", "no: it is a pear")


def test_a_loader_is_read():
    assert parse_loader(None) is None
    assert parse_loader("elastic_trainer,ranks-per-node=8,node-memory=2GiB") == Loader(
        ranks_per_node=8, memory_bytes=2 << 30
    )
    assert parse_loader("elastic_trainer,node-memory=1,ranks-per-node=1,loads=3") == Loader(
        ranks_per_node=1, memory_bytes=1, num_loads=3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read"),
        ("elastic_trainer", "ranks-per-node is missing"),
        ("elastic_trainer,ranks-per-node=8", "node-memory is missing"),
        ("deepspeed,ranks-per-node=8,node-memory=1GiB", "cannot read"),
        ("elastic_trainer,ranks-per-node=0,node-memory=1GiB", "expected 1 or more"),
        ("elastic_trainer,ranks-per-node=8,node-memory=1GiB,loads=0", "expected 1 or more"),
        ("elastic_trainer,ranks-per-node=x,node-memory=1GiB", "invalid literal"),
        ("elastic_trainer,ranks-per-node=8,node-memory=1 GB", "write a number of"),
        ("elastic_trainer,ranks-per-node=8,node-memory=1GiB,nodes=3", "cannot read"),
        ("elastic_trainer,ranks-per-node=8,ranks-per-node=8,node-memory=1GiB", "cannot read"),
    ],
)
def test_a_loader_that_is_not_understood_is_refused_with_an_example(text, message):
    with pytest.raises(UsageError, match=message) as refused:
        parse_loader(text)
    assert "elastic_trainer,ranks-per-node=8,node-memory=512GiB" in str(refused.value.hint)
