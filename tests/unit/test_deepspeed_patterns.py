"""universal_checkpoint_info -> boxes: every category, and what is refused."""

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.patterns import parse

INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 13,
    "padded_vocab_size": 16,
    "vocabulary_parameter_patterns": [r"^embed"],
    "tp_replicated_parameter_patterns": [r".*norm"],
    "parameter_with_row_parallelism_patterns": [r".*\.down"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.gate_up"],
    "parameter_with_sub_params": [{"patterns": [r".*\.qkv"], "shape": ((8, 4, 4), 8), "partition_dim": 0}],
    "parameter_to_average_patterns": [r".*\.averaged"],
}


@pytest.mark.parametrize(
    ("name", "shard", "whole", "rank1"),
    [
        ("0.norm", (8,), (8,), [((0,), (0,), (8,))]),
        ("0.down", (8, 3), (8, 6), [((0, 0), (0, 3), (8, 3))]),
        ("0.other", (4, 8), (8, 8), [((0, 0), (4, 0), (4, 8))]),
        ("embed.weight", (8, 8), (16, 8), [((0, 0), (8, 0), (8, 8))]),
        ("0.gate_up", (6, 8), (12, 8), [((0, 0), (3, 0), (3, 8)), ((3, 0), (9, 0), (3, 8))]),
        ("0.qkv", (8, 8), (16, 8), [((0, 0), (4, 0), (4, 8)), ((4, 0), (10, 0), (2, 8)), ((6, 0), (14, 0), (2, 8))]),
    ],
)
def test_rule_says_what_the_second_of_two_ranks_holds(name, shard, whole, rank1):
    rule = parse(INFO).rule(name, len(shard))
    assert rule.whole_shape(name, [shard, shard]) == whole
    assert rule.shard_shape(name, whole, 2) == shard
    assert [tuple(piece) for piece in rule.pieces(whole, 2, 1)] == rank1


def test_pattern_matches_from_the_start_of_the_name():
    assert parse(INFO).rule("model.embed.weight", 2).vocabulary is False


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"parameter_with_row_parallelism_patterns": [r".*norm"]}, "0.norm", "all claim it"),
        ({}, "0.averaged", "average"),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": (2, 4, 8), "partition_dim": 0}]}, "0.x", "view"),
        ({"parameter_with_sub_params": [{"patterns": [".*"]}]}, "0.x", "without patterns, shape"),
        ({"tp_replicated_parameter_patterns": ["("]}, "0.x", "pattern"),
        ({"tp_replicated_parameter_patterns": [5]}, "0.x", "not a string"),
    ],
)
def test_ambiguous_or_broken_patterns_are_refused(change, name, text):
    with pytest.raises(UnsupportedError, match=text):
        parse({**INFO, **change}).rule(name, 2)


def test_uneven_splits_are_refused():
    with pytest.raises(UnsupportedError, match="uneven"):
        parse({**INFO, "sub_param_shard_widths": {"x": [[3, 5]]}})
    with pytest.raises(UnsupportedError, match="expected equal ones"):
        parse(INFO).rule("0.other", 2).whole_shape("0.other", [(3, 8), (5, 8)])
    with pytest.raises(UnsupportedError, match="not divisible by tp=3"):
        parse(INFO).rule("0.qkv", 2).shard_shape("0.qkv", (16, 8), 3)


def test_sub_parameters_must_add_up():
    with pytest.raises(UnsupportedError, match="names the parts"):
        parse(INFO).rule("0.qkv", 2).whole_shape("0.qkv", [(9, 8), (9, 8)])


@pytest.mark.parametrize(("multiple", "tp", "rows"), [(None, 1, 16), (None, 4, 16), (2, 1, 14), (2, 4, 16), (4, 4, 16)])
def test_padded_rows_of_the_vocabulary(multiple, tp, rows):
    info = INFO if multiple is None else {**INFO, "vocab_multiple": multiple}
    assert parse(info).padded_rows(tp) == rows


def test_metadata_of_megatron_at_tp_1_is_recognised_by_its_missing_row_parallel_patterns():
    assert parse(INFO).tells_rows
    assert not parse({**INFO, "parameter_with_row_parallelism_patterns": []}).tells_rows
    assert not parse(None).declared
