"""Arguments of Megatron-DeepSpeed in a checkpoint, and copies that only the first stage uses."""

from reshard.formats.deepspeed.tensor_parallel import megatron, patterns
from reshard.formats.pt.objects import Global, Inert
from reshard.topology import Topology

INFO = {"original_vocab_size": 50, "padded_vocab_size": 64}
STATE = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "data_parallel_size": 3, "world_size": 24,
    "make_vocab_size_divisible_by": 8, "padded_vocab_size": 64, "hidden_size": 32,
}  # fmt: skip


def arguments(cls=("argparse", "Namespace"), **changes) -> Inert:
    return Inert("new", Global(*cls), (), {**STATE, **changes})


def test_vocabulary_multiple_is_that_of_the_arguments():
    assert megatron.add_vocabulary_multiple(INFO, {"args": arguments()}) == {**INFO, "vocab_multiple": 8}
    parsed = patterns.parse(megatron.add_vocabulary_multiple(INFO, {"args": arguments()}))
    assert [parsed.padded_rows(tp) for tp in (1, 2, 4, 8)] == [56, 64, 64, 64]


def test_arguments_that_do_not_explain_the_padding_are_not_used():
    for changes in (
        {"make_vocab_size_divisible_by": 24}, {"padded_vocab_size": 80}, {"make_vocab_size_divisible_by": 0},
        {"make_vocab_size_divisible_by": None}, {"tensor_model_parallel_size": 4},
    ):  # fmt: skip
        file = {"args": arguments(**changes)}
        explained = changes == {"tensor_model_parallel_size": 4}  # 64 is a multiple of 8 times 4, too
        assert ("vocab_multiple" in megatron.add_vocabulary_multiple(INFO, file)) is explained
    for file in ({}, {"args": arguments(("types", "SimpleNamespace"))}, {"args": 3}):
        assert megatron.add_vocabulary_multiple(INFO, file) == INFO
    assert megatron.add_vocabulary_multiple(None, {"args": arguments()}) is None
    own = {**INFO, "vocab_multiple": 16}
    assert megatron.add_vocabulary_multiple(own, {"args": arguments()}) == own


def test_arguments_get_the_degrees_of_the_target():
    saved = arguments()
    made = megatron.replace_arguments(saved, Topology.parse("tp=1,pp=2,dp=5,zero=1"), 56)
    assert made.state == {
        **STATE, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "data_parallel_size": 5,
        "world_size": 10, "padded_vocab_size": 56,
    }  # fmt: skip
    assert saved.state == STATE
    assert list(made.state) == list(STATE)
    assert megatron.replace_arguments(saved, Topology.parse("tp=1"), None).state["padded_vocab_size"] == 64
    other = Inert("new", Global("argparse", "Namespace"), (), {"world_size": 3})
    assert megatron.replace_arguments(other, Topology.parse("tp=1"), None) is other


def test_first_stage_counts_for_replicated_parameters_that_are_no_vocabulary():
    words, positions = (f"tied_modules.embed.{name}_embeddings.weight" for name in ("word", "position"))
    info = {"vocabulary_parameter_patterns": [words], "pipeline_replicated_parameter_patterns": [words, positions]}
    parsed = patterns.parse(info)
    assert [parsed.takes_first_stage(name) for name in (words, positions, "3.bias")] == [False, True, False]
    averaged = patterns.parse({**info, "parameter_to_average_patterns": [positions]})
    assert not averaged.takes_first_stage(positions)
