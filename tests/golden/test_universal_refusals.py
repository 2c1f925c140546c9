"""Universal folders that DeepSpeed cannot load, or loads wrongly, are refused or noted."""

import dataclasses
from types import SimpleNamespace

import pytest

from reshard.errors import UnsupportedError, UsageError
from reshard.formats import format_of, read_checkpoint
from reshard.formats.base import Request
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.tensor_parallel import patterns
from reshard.formats.deepspeed.tensor_parallel.rules import Rule
from reshard.formats.pt.objects import new_tensor
from reshard.formats.universal.blueprint import blueprint_of
from reshard.formats.universal.refusals import list_warnings, refuse, stage3_problems
from reshard.formats.universal.vocabulary import pad_vocabulary
from reshard.topology import Topology
from tests.golden.files import golden
from tests.golden.universal_files import converted


def layout(name: str, topology: str):
    index = read_checkpoint(golden(name), None)
    return format_of("universal").layout(index, Request(topology=Topology.parse(topology)))


def one_group(name: str):
    """A blueprint whose first group is its only one."""
    found = blueprint_of(read_checkpoint(golden(name), None))
    return dataclasses.replace(found, groups=found.groups[:1])


@pytest.mark.parametrize(
    ("name", "topology", "expected"),
    [
        ("zero2-dp3", "dp=2,zero=0", "in the ZeRO stages 1, 2 and 3 only"),
        ("zero2-dp3", "dp=2,zero=3", "2 parameter groups: they would share one tensor step"),
        ("zero2-dp3", "tp=2,zero=1", "it is not said how tensor parallelism cuts embed.weight"),
        ("pipeline-dp2", "tp=3,zero=1", "is not divisible by tp=3"),
        ("elastic-dp2", "dp=2,zero=1", "is an elastic checkpoint"),
    ],
)
def test_targets_that_deepspeed_cannot_load(name, topology, expected):
    with pytest.raises(UnsupportedError, match=expected):
        layout(name, topology)


def test_a_type_of_weights_is_refused_rather_than_ignored():
    request = Request(topology=Topology(zero=1), weight_dtype="bfloat16")
    with pytest.raises(UsageError, match="--dtype bfloat16"):
        format_of("universal").layout(read_checkpoint(golden("zero2-dp3"), None), request)


def test_several_groups_are_said_to_be_for_stages_1_and_2():
    (note,) = [note for note in layout("zero2-dp3", "dp=2,zero=1").notes if "stage" in note]
    assert note.startswith("load it in ZeRO stage 1 or 2: stage 3 would load it wrongly")


def test_one_group_of_adam_is_for_all_stages():
    found = one_group("zero2-dp3")
    assert stage3_problems(found) == []
    refuse(found, Topology(dp=2, zero=3))


def test_other_states_than_adams_are_not_for_stage_3():
    found = one_group("zero2-dp3")
    (group,) = found.groups
    momentum = dataclasses.replace(group, dtypes={"fp32": "float32", "momentum_buffer": "float32"}, scalars={})
    other = dataclasses.replace(found, groups=(momentum,))
    refuse(other, Topology(dp=2, zero=1))
    with pytest.raises(UnsupportedError, match="has the states momentum_buffer; only exp_avg"):
        refuse(other, Topology(dp=2, zero=3))


def test_groups_of_different_steps_are_not_for_stage_3():
    found = one_group("zero2-dp3")
    first = dataclasses.replace(found.groups[0], scalars={"step": 4})
    other = dataclasses.replace(found, groups=(first, dataclasses.replace(first, scalars={"step": 5})))
    assert stage3_problems(other) == [
        "parameter groups have done different numbers of steps, and would get that of group 0"
    ]


def test_other_numbers_of_a_group_than_step_have_no_place():
    found = one_group("zero2-dp3")
    scalars = {**found.groups[0].scalars, "mu_product": new_tensor("float32", (), bytes(4))}
    other = dataclasses.replace(found, groups=(dataclasses.replace(found.groups[0], scalars=scalars),))
    with pytest.raises(UnsupportedError, match="group 0 of the optimizer has mu_product"):
        refuse(other, Topology(zero=1))


def test_native_experts_are_for_one_expert_parallel_rank():
    found = one_group("zero2-dp3")
    name = "moe.deepspeed_moe.experts.deepspeed_experts.0.weight"
    other = dataclasses.replace(found, params={name: Param(name=name, shape=(2,), rule=Rule(dim=None))})
    with pytest.raises(UnsupportedError, match="would load the experts of the first one"):
        refuse(other, Topology(dp=2, ep=2, zero=1))
    assert any("ep=1 only" in note for note in list_warnings(other, Topology(dp=2, zero=1), other.params))


def test_small_sub_groups_and_round_robin_have_to_be_turned_off():
    found = one_group("zero3-dp3")
    names = {name: found.params[name] for group in found.groups for name in group.names}
    assert not any("sub_group_size" in note for note in list_warnings(found, Topology(dp=3, zero=3), names))
    # 91, 21 and 21 elements: a sub-group is closed as soon as it holds 40 or more
    notes = list_warnings(found, Topology(dp=1, zero=3), names)
    assert any("sub_group_size to at least 133 " in note for note in notes)
    notes = list_warnings(one_group("zero2-dp3-round-robin"), Topology(dp=3, zero=1), names)
    assert any(note.startswith("turn round_robin_gradients off") for note in notes)


@pytest.mark.parametrize(
    ("more", "topology", "rows"),
    [
        ({}, "tp=2,zero=1", (16, 13)),  # as in the source
        ({}, "tp=1,zero=1", (16, 13)),  # taken to stay; DeepSpeed fails if the model has fewer
        ({}, "tp=2,zero=3", (16, 13)),
        ({"vocab_multiple": 5}, "tp=1,zero=3", (15, 13)),
        ({"vocab_multiple": 5}, "tp=2,zero=1", (20, 13)),
        ({"original_vocab_size": 16}, "tp=1,zero=3", (16, None)),
    ],
)
def test_rows_of_the_vocabulary(more, topology, rows):
    blueprint, param = vocabulary_of(more)
    found = pad_vocabulary(param, blueprint, Topology.parse(topology))
    assert (found.shape[0], found.rows) == rows


def vocabulary_of(more):
    native = blueprint_of(read_checkpoint(golden("pipeline-tp2-pp2"), None))
    info = {**native.patterns.info, **more}
    param = native.params["tied_modules.embed.weight"]
    param = dataclasses.replace(param, rows=None if info["original_vocab_size"] == 16 else 13)
    return dataclasses.replace(native, patterns=patterns.parse(info)), param


def test_unknown_rows_of_the_vocabulary_are_not_for_stage_3():
    blueprint, param = vocabulary_of({})
    with pytest.raises(UnsupportedError, match=r"vocabulary of 13 is padded at tp=1 is not known \(16 at tp=2\)"):
        pad_vocabulary(param, blueprint, Topology(zero=3))


def test_a_vocabulary_without_padding_gets_some_for_stage_3_only():
    theirs = blueprint_of(read_checkpoint(converted("pipeline-tp2-pp2"), None))
    param = theirs.params["tied_modules.embed.weight"]
    assert (param.shape[0], param.rows) == (13, None)
    assert pad_vocabulary(param, theirs, Topology(tp=2, zero=1)) == param
    found = pad_vocabulary(param, theirs, Topology(tp=2, zero=3))
    assert (found.shape[0], found.rows) == (16, 13)


def test_names_that_are_no_vocabularys_are_left_alone():
    blueprint, _ = vocabulary_of({})
    other = SimpleNamespace(name="1.qkv", shape=(16, 8))
    assert pad_vocabulary(other, blueprint, Topology(zero=3)) is other
