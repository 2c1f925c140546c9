"""Statements about tensor parallelism in an atom's file, and the rules that follow."""

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE, Rule
from reshard.formats.pt.objects import Global, Inert, new_tensor
from reshard.formats.universal.hints import for_param, parse
from reshard.formats.universal.names import atom_file, check_names, state_of


def view(hints):
    """The view and the dim that are cut, of hints that speak of fused tensors."""
    (shape,) = hints.values()
    assert list(hints) == ["sub_param_shape"]
    assert shape.target == Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    assert shape.state["patterns"] == [r"^layer\.weight$"]
    return shape.state["shape"], shape.state["partition_dim"]


def hints_for(rule: Rule, shape: tuple[int, ...], *, cut_is_known: bool = True):
    return for_param(Param(name="layer.weight", shape=shape, rule=rule), cut_is_known=cut_is_known)


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        (WHOLE, (6,), {}),
        (Rule(dim=0), (8, 4), {"cat_dim": 0}),
        (Rule(dim=1), (8, 4), {"cat_dim": 1}),
        (Rule(dim=0, parts=(5,), widths=((3, 2),)), (5, 4), {"cat_dim": 0}),
        (Rule(dim=0, vocabulary=True), (8, 4), {"cat_dim": 0, "vocab_tensor": True}),
        (Rule(dim=0, num_parts=2), (8, 4), {"cat_dim": 0, "param_n_sub_params": 2}),
        (Rule(dim=None, vocabulary=True), (8, 4), {}),  # with the flag DeepSpeed would pad and cut it
    ],
)
def test_plain_cuts(rule, shape, expected):
    assert hints_for(rule, shape) == expected


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        (Rule(dim=0, parts=(8, 4, 4)), (16, 5), (((8, 4, 4), 5), 0)),
        (Rule(dim=1, num_parts=3), (5, 12), ((5, (4, 4, 4)), 1)),
        (Rule(dim=1, num_parts=2), (5, 12), ((5, (6, 6)), 1)),
        (Rule(dim=0, repeat=3, parts=(4,)), (12, 5), ((3, (4,), 5), 1)),
        (Rule(dim=0, repeat=3, num_parts=2), (12, 5), ((3, (2, 2), 5), 1)),
        (Rule(dim=0, parts=(4, 2, 2), unit=3), (24, 5), (((4, 2, 2), 3, 5), 0)),
    ],
)
def test_fused_tensors(rule, shape, expected):
    assert view(hints_for(rule, shape)) == expected


@pytest.mark.parametrize("shape", [(), (6,), (8, 4)])
def test_what_is_not_known_cannot_be_cut(shape):
    """DeepSpeed views the tensor with a first dim of 1 and cuts that: whole for one rank, nothing for a second."""
    assert view(hints_for(WHOLE, shape, cut_is_known=False)) == (((1,), *shape), 0)


def test_a_vocabulary_is_known_even_if_the_rest_is_not():
    hints = hints_for(Rule(dim=0, vocabulary=True), (8, 4), cut_is_known=False)
    assert hints == {"cat_dim": 0, "vocab_tensor": True}


def test_atoms_of_both_kinds_are_understood():
    tensor = new_tensor("float32", (2,))
    assert parse(tensor, "x.pt") == (tensor, None)
    assert parse({"param": tensor, "cat_dim": 1}, "x.pt") == (tensor, {"cat_dim": 1})
    expert = {"is_expert_param": True, "ep_num_experts": 2}
    assert parse({"param": tensor, **expert}, "x.pt") == (tensor, expert)


@pytest.mark.parametrize("value", [None, 3, [], {}, {"param": 1}, {"cat_dim": 0}])
def test_files_that_are_no_atoms(value):
    with pytest.raises(UnsupportedError, match=r"x\.pt: is "):
        parse(value, "x.pt")


@pytest.mark.parametrize(
    "hint",
    [{"cat_dim": True}, {"cat_dim": "1"}, {"vocab_tensor": 1}, {"sub_param_shape": (1, 2)}, {"ep_num_experts": 2.0}],
)
def test_hints_of_other_types(hint):
    with pytest.raises(UnsupportedError, match=r"x\.pt: says "):
        parse({"param": new_tensor("float32", (2,)), **hint}, "x.pt")


def test_hints_of_a_newer_version():
    with pytest.raises(UnsupportedError, match=r"'scale'.*cat_dim"):
        parse({"param": new_tensor("float32", (2,)), "scale": 2.0}, "x.pt")
    other = Inert("new", Global("os", "SubparamShape"), (), {})
    with pytest.raises(UnsupportedError, match="not what DeepSpeed writes"):
        parse({"param": new_tensor("float32", (2,)), "sub_param_shape": other}, "x.pt")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", "a\0", "x" * 256, "ä" * 128])
def test_names_that_cannot_be_folders(name):
    with pytest.raises(UnsupportedError, match="1 parameters have names"):
        check_names(["fine", name], "source")


def test_names_that_can():
    check_names(["0.attention.weight", "x" * 255, "module.weight#1", ".hidden"], "source")


def test_states_of_files():
    assert atom_file("a.b", "exp_avg") == "zero/a.b/exp_avg.pt"
    assert [state_of(name) for name in ("fp32.pt", "step.pt", "fp32.pt.tmp", "notes.txt")] == [
        "fp32",
        "step",
        None,
        None,
    ]
