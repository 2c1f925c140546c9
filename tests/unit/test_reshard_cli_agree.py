"""When two checkpoints agree, and what cannot be compared."""

import pytest

from reshard.agree import Agreement, Side, compare
from reshard.layout import LogicalTensor, TensorKey


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
    found = compare(one, one)
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
    assert compare(side("weight/a=1", "weight/b=2"), second).different == (message,)


def test_a_state_of_one_side_alone_is_not_compared() -> None:
    found = compare(side("weight/a=1", "exp_avg/a=2", "exp_avg/b=3"), side("weight/a=1", "step/a=4"))
    assert found.different == ()
    assert found.not_compared == (
        "exp_avg, 2 tensors: only in the first",
        "step, 1 tensor: only in the second",
    )


@pytest.mark.parametrize("swap", [False, True])
def test_weights_are_compared_with_master_weights_where_one_side_has_no_weights(swap: bool) -> None:
    sides = [side("fp32/a=1", "weight/buffer=2"), side("weight/a=1", "weight/buffer=2")]
    found = compare(*(reversed(sides) if swap else sides))
    assert (found.different, found.not_compared) == ((), ())
    assert found.to_dict()["across_states"] == [["weight/a", "fp32/a"] if swap else ["fp32/a", "weight/a"]]
    wrong = compare(side("fp32/a=1"), side("weight/a=9"))
    assert wrong.different == ("fp32/a and weight/a: 1 in the first, 9 in the second",)


def test_a_side_with_both_states_is_compared_in_both() -> None:
    both, weights = side("weight/a=1", "fp32/a=1"), side("weight/a=1")
    assert len(compare(both, weights).same) == len(compare(weights, both).same) == 2
    assert compare(side("weight/a=1", "fp32/a=7"), weights).different != ()
    assert compare(weights, side("weight/a=1", "fp32/a=7")).different != ()


@pytest.mark.parametrize("swap", [False, True])
def test_other_types_are_not_compared_and_said(swap: bool) -> None:
    """bf16 ZeRO-1 has both; bf16 ZeRO-3 has master weights, and buffers as weights."""
    sides = [
        side("weight/a:bfloat16=1", "fp32/a=2", "weight/buffer:bfloat16=3"),
        side("fp32/a=2", "weight/buffer:bfloat16=3"),
    ]
    found = compare(*(reversed(sides) if swap else sides))
    assert found.different == ()
    assert len(found.same) == 2
    (note,) = found.not_compared
    assert note.endswith("1 tensor: other types")


def test_padding_may_differ_in_size_but_not_in_content() -> None:
    one = side("weight/a=1", "weight/a#padding@3=0")
    assert compare(one, side("weight/a=1", "weight/a#padding@5=0")).different == ()
    assert compare(one, side("weight/a=1", "weight/a#padding@5=7")).different != ()
    without = compare(one, side("weight/a=1"))
    assert without.different == ()
    assert without.not_compared == ("weight (padding), 1 tensor: only in the first",)


@pytest.mark.parametrize("swap", [False, True])
def test_tied_weights_may_be_held_under_either_name(swap: bool) -> None:
    sides = [side("weight/embed=1", aliases={"head": "embed"}), side("weight/head=1")]
    found = compare(*(reversed(sides) if swap else sides))
    assert (len(found.same), found.different) == (1, ())
