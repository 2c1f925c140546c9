"""When two checkpoints agree, and what cannot be compared."""

import dataclasses

import pytest

from reshard.execution.compare import Agreement, Side, compare_sides, find_types_to_round
from reshard.tensors.layout import LogicalTensor, TensorKey


def side(*entries: str, aliases: dict[str, str] | None = None, dtype: str = "float32") -> Side:
    """Entries are `state/name=digest` or `state/name:dtype=digest`; shapes are [2], or [digits after @]."""
    tensors, digests = {}, {}
    for entry in entries:
        left, _, digest = entry.partition("=")
        left, _, shape = left.partition("@")
        left, _, own = left.partition(":")
        key = TensorKey(*left.split("/"))
        tensors[key] = LogicalTensor(key=key, shape=(int(shape or 2),), dtype=own or dtype)
        digests[key] = digest
    return Side(tensors=tensors, digests=digests, aliases=aliases or {})


def test_equal_sides_agree_in_everything() -> None:
    one = side("weight/a=1", "fp32/a=1", "exp_avg/a=2")
    found = compare_sides(one, one)
    assert found == Agreement(same=tuple((key, key) for key in one.digests), different=(), not_compared=())


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (side("weight/a=1", "weight/b=3"), "weight/b: 2 in the first, 3 in the second"),
        (side("weight/a=1"), "weight/b: only in the first"),
        (side("weight/a=1", "weight/b=2", "weight/c=3"), "weight/c: only in the second"),
        (side("weight/a=1", "weight/b@3=2"), "weight/b: [2] in the first, [3] in the second"),
    ],
)
def test_what_both_could_hold_must_be_equal(second: Side, message: str) -> None:
    assert compare_sides(side("weight/a=1", "weight/b=2"), second).different == (message,)


def test_a_state_of_one_side_alone_is_not_compared() -> None:
    found = compare_sides(side("weight/a=1", "exp_avg/a=2", "exp_avg/b=3"), side("weight/a=1", "step/a=4"))
    assert found.different == ()
    assert found.not_compared == (
        "exp_avg, 2 tensors: only in the first",
        "step, 1 tensor: only in the second",
    )


@pytest.mark.parametrize("swap", [False, True])
def test_weights_are_compared_with_master_weights_where_one_side_has_no_weights(swap: bool) -> None:
    sides = [side("fp32/a=1", "weight/buffer=2"), side("weight/a=1", "weight/buffer=2")]
    found = compare_sides(*(reversed(sides) if swap else sides))
    assert (found.different, found.not_compared) == ((), ())
    assert found.to_dict()["across_states"] == [["weight/a", "fp32/a"] if swap else ["fp32/a", "weight/a"]]
    wrong = compare_sides(side("fp32/a=1"), side("weight/a=9"))
    assert wrong.different == ("fp32/a and weight/a: 1 in the first, 9 in the second",)


def test_a_side_with_both_states_is_compared_in_both() -> None:
    both, weights = side("weight/a=1", "fp32/a=1"), side("weight/a=1")
    assert len(compare_sides(both, weights).same) == len(compare_sides(weights, both).same) == 2
    assert compare_sides(side("weight/a=1", "fp32/a=7"), weights).different != ()
    assert compare_sides(weights, side("weight/a=1", "fp32/a=7")).different != ()


@pytest.mark.parametrize("swap", [False, True])
def test_other_types_are_not_compared_and_said(swap: bool) -> None:
    """bf16 ZeRO-1 has both; bf16 ZeRO-3 has master weights, and buffers as weights."""
    sides = [
        side("weight/a:bfloat16=1", "fp32/a=2", "weight/buffer:bfloat16=3"),
        side("fp32/a=2", "weight/buffer:bfloat16=3"),
    ]
    found = compare_sides(*(reversed(sides) if swap else sides))
    assert found.different == ()
    assert len(found.same) == 2
    (note,) = found.not_compared
    assert note.endswith("1 tensor: other types")


def test_padding_may_differ_in_size_but_not_in_content() -> None:
    one = side("weight/a=1", "weight/a#padding@3=0")
    assert compare_sides(one, side("weight/a=1", "weight/a#padding@5=0")).different == ()
    assert compare_sides(one, side("weight/a=1", "weight/a#padding@5=7")).different != ()
    without = compare_sides(one, side("weight/a=1"))
    assert without.different == ()
    assert without.not_compared == ("weight (padding), 1 tensor: only in the first",)


@pytest.mark.parametrize("swap", [False, True])
def test_tied_weights_may_be_held_under_either_name(swap: bool) -> None:
    sides = [side("weight/embed=1", aliases={"head": "embed"}), side("weight/head=1")]
    found = compare_sides(*(reversed(sides) if swap else sides))
    assert (len(found.same), found.different) == (1, ())


def test_weights_made_of_master_weights_alone_are_compared_by_rounding() -> None:
    masters, weights = side("fp32/a=1", "fp32/b=2"), side("weight/a:bfloat16=7", "weight/b:bfloat16=8")
    assert find_types_to_round(masters, weights) == (
        {TensorKey("fp32", "a"): "bfloat16", TensorKey("fp32", "b"): "bfloat16"},
        {},
    )
    assert find_types_to_round(weights, masters) == ({}, find_types_to_round(masters, weights)[0])
    good = dataclasses.replace(masters, rounded={TensorKey("fp32", "a"): "7", TensorKey("fp32", "b"): "8"})
    for sides in ((good, weights), (weights, good)):
        found = compare_sides(*sides)
        assert (len(found.same), found.rounded, found.different, found.not_compared) == (2, 2, (), ())
    bad = dataclasses.replace(masters, rounded={TensorKey("fp32", "a"): "7", TensorKey("fp32", "b"): "9"})
    (told,) = compare_sides(bad, weights).different
    assert told.startswith("fp32/b and weight/b") and told.endswith("differ by more than rounding")


def test_nothing_is_rounded_where_the_same_type_can_be_compared() -> None:
    both = side("weight/a:bfloat16=7", "fp32/a=1")
    for other in (side("fp32/a=1"), side("weight/a:bfloat16=7"), both):
        assert find_types_to_round(both, other) == find_types_to_round(other, both) == ({}, {})
    assert find_types_to_round(side("weight/a:int64=1"), side("weight/a:bool=1")) == ({}, {})
    assert find_types_to_round(side("weight/a:float16=1"), side("weight/a:bfloat16=1")) == ({}, {})
