"""universal_checkpoint_info -> boxes: every category, and what is refused."""

import math

import numpy as np
import pytest

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.patterns import parse

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
    assert [tuple(piece) for piece in rule.box_pairs(whole, 2, 1)] == rank1


def test_pattern_matches_from_the_start_of_the_name():
    assert parse(INFO).rule("model.embed.weight", 2).vocabulary is False


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"parameter_with_row_parallelism_patterns": [r".*norm"]}, "0.norm", "all claim it"),
        ({"parameter_with_row_parallelism_patterns": [r".*\.averaged"]}, "0.averaged", "all claim it"),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": (2, 4, 8), "partition_dim": 0}]}, "0.x", "view"),
        (
            {"parameter_with_sub_params": [{"patterns": [".*"], "shape": (2, 4), "partition_dim": 2}]},
            "0.x",
            "cuts dim 2",
        ),
        ({"parameter_with_sub_params": [{"patterns": [".*"]}]}, "0.x", "without patterns, shape"),
        ({"tp_replicated_parameter_patterns": ["("]}, "0.x", "pattern"),
        ({"tp_replicated_parameter_patterns": [5]}, "0.x", "not a string"),
    ],
)
def test_ambiguous_or_broken_patterns_are_refused(change, name, text):
    with pytest.raises(UnsupportedError, match=text):
        parse({**INFO, **change}).rule(name, 2)


def test_an_averaged_parameter_is_whole_on_every_rank():
    rule = parse(INFO).rule("0.averaged", 2)
    assert (rule.dim, rule.averaged) == (None, True)
    assert not parse(INFO).rule("averaged", 2).averaged  # patterns match from the start of the name
    assert not parse(INFO).rule("0.norm", 1).averaged


def test_what_is_declared_equal_too_is_not_averaged():
    """As in DeepSpeed, which looks at replicated parameters first, and at affine maps before that."""
    rule = parse({**INFO, "tp_replicated_parameter_patterns": [r".*"]}).rule("0.averaged", 2)
    assert (rule.dim, rule.averaged) == (None, False)
    mapped = {**INFO, "affine_map": {"version": 1, "params": {r".*\.averaged": {}}}}
    assert parse(mapped).rule("0.averaged", 2).averaged is False


def test_uneven_parts_need_their_widths():
    with pytest.raises(UnsupportedError, match="sub_param_shard_widths"):
        parse(INFO).rule("0.qkv", 2).resolve("0.qkv", [(9, 8), (7, 8)])
    with pytest.raises(UnsupportedError, match="not divisible by tp=3"):
        parse(INFO).rule("0.qkv", 2).shard_shape("0.qkv", (16, 8), 3)


def test_uneven_shards_of_one_tensor_say_their_widths_themselves():
    rule, whole = parse(INFO).resolve("0.other", [(3, 8), (5, 8)])
    assert whole == (8, 8)
    assert [rule.shard_shape("0.other", whole, 2, rank) for rank in (0, 1)] == [(3, 8), (5, 8)]
    assert [tuple(piece) for piece in rule.box_pairs(whole, 2, 1)] == [((0, 0), (3, 0), (5, 8))]
    assert rule.shard_shape("0.other", whole, 4, 3) == (2, 8)


WIDTHS = {
    "universal_checkpoint_version": 0.4,
    "parameter_with_row_parallelism_patterns": [r".*\.down"],
    "parameter_with_sub_params": [{"patterns": [r"^qkv$"], "shape": ((12, 4, 4), 8), "partition_dim": 0}],
    "sub_param_shard_widths": {r"^qkv$": [[8, 4], [4, 0], [0, 4]]},
}


def test_declared_widths_say_what_a_rank_holds_of_each_part():
    rule, whole = parse(WIDTHS).resolve("qkv", [(12, 8), (8, 8)])
    assert whole == (20, 8)
    assert [tuple(piece) for piece in rule.box_pairs(whole, 2, 0)] == [
        ((0, 0), (0, 0), (8, 8)),
        ((8, 0), (12, 0), (4, 8)),
    ]
    assert [tuple(piece) for piece in rule.box_pairs(whole, 2, 1)] == [
        ((0, 0), (8, 0), (4, 8)),
        ((4, 0), (16, 0), (4, 8)),
    ]
    assert rule.shard_shape("qkv", whole, 4) == (5, 8)
    with pytest.raises(UnsupportedError, match="do not add up"):
        parse(WIDTHS).resolve("qkv", [(11, 8), (9, 8)])


def test_description_for_another_degree_keeps_no_width_of_the_sources_ranks():
    told = parse({**WIDTHS, "affine_map": {"version": 1, "params": {}}})
    assert told.info_at(2, 2)["sub_param_shard_widths"] == WIDTHS["sub_param_shard_widths"]
    found = told.info_at(4, 2)
    assert "affine_map" not in found
    assert found["sub_param_shard_widths"] == {r"^qkv$": [[3] * 4, [1] * 4, [1] * 4]}
    assert told.info_at(8, 2)["sub_param_shard_widths"] == {}


@pytest.mark.parametrize(
    ("shape", "dim", "shard", "whole", "runs"),
    [
        ((4, (6,), 8), 1, (12, 8), (24, 8), (4, 1)),  # experts fused with their output
        (((8, 4, 4), 2, 8), 0, (16, 8), (32, 8), (1, 2)),  # heads of width 2
        ((2, (4, 2), -1), 1, (6, 5), (12, 5), (2, 1)),
        ((4, (6,), 2, 4), 1, (12, 8), (24, 8), (4, 1)),
        ((3, (4,)), 1, (3, 2), (3, 4), (1, 1)),
    ],
)
def test_view_of_more_dims_is_cut_in_runs(shape, dim, shard, whole, runs):
    entry = {"patterns": ["x"], "shape": shape, "partition_dim": dim, "own_dims": False}
    rule, found = parse({"parameter_with_sub_params": [entry]}).resolve("x", [shard, shard])
    assert (found, rule.repeat, rule.unit) == (whole, *runs)
    view = tuple(sum(size) if isinstance(size, tuple) else size for size in shape)
    everything = np.arange(math.prod(whole)).reshape(whole)
    parts = np.split(everything.reshape(view), np.cumsum(shape[dim])[:-1], axis=dim)
    for rank in (0, 1):
        expected = np.concatenate([np.split(part, 2, axis=dim)[rank] for part in parts], axis=dim).reshape(shard)
        local = np.full(shard, -1)
        for piece in rule.box_pairs(whole, 2, rank):
            box = tuple(slice(low, low + size) for low, size in zip(piece.whole, piece.size, strict=True))
            here = tuple(slice(low, low + size) for low, size in zip(piece.local, piece.size, strict=True))
            local[here] = everything[box]
        assert (local == expected).all()


def test_view_that_does_not_fit_is_refused():
    entry = {"patterns": ["x"], "shape": (5, (6,), 8), "partition_dim": 1}
    with pytest.raises(UnsupportedError, match="are no parts of the view"):
        parse({"parameter_with_sub_params": [entry]}).resolve("x", [(12, 8), (12, 8)])


def replicated(shape):
    piece = {"shape": list(shape), "source": [0, [8, 1]], "dest": [0, [8, 1]], "locations": [0, 1]}
    ranks = {rank: {"shard_shape": list(shape), "pieces": [piece]} for rank in (0, 1)}
    return {"logical_shape": list(shape), "ranks": ranks}


def test_affine_map_is_held_against_its_pattern():
    info = {**INFO, "affine_map": {"version": 1, "params": {r"^0\.norm$": replicated((4, 8))}}}
    assert parse(info).resolve("0.norm", [(4, 8), (4, 8)])[1] == (4, 8)
    info["affine_map"]["params"] = {r"^0\.other$": replicated((4, 8))}
    with pytest.raises(UnsupportedError, match="affine map cuts"):
        parse(info).resolve("0.other", [(4, 8), (4, 8)])


def test_scaled_and_later_affine_maps_are_refused():
    scaled = replicated((4, 8))
    scaled["ranks"][0]["pieces"][0]["scale"] = 0.5
    info = {**INFO, "affine_map": {"version": 1, "params": {r"^0\.norm$": scaled}}}
    with pytest.raises(UnsupportedError, match=r"scales values by 0.5"):
        parse(info).resolve("0.norm", [(4, 8), (4, 8)])
    with pytest.raises(UnsupportedError, match="affine maps of version 2"):
        parse({**INFO, "affine_map": {"version": 2}}).resolve("0.norm", [(4, 8), (4, 8)])
    with pytest.raises(UnsupportedError, match="is not understood"):
        parse({**INFO, "affine_map": {"params": {r"^0\.norm$": {"ranks": 3}}}}).resolve("0.norm", [(4, 8), (4, 8)])


def test_parameters_that_autotp_cannot_convert_are_refused_with_its_reason():
    info = {**INFO, "autotp_unsupported_parameter_patterns": {r"^0\.strange$": "interleaved heads"}}
    with pytest.raises(UnsupportedError, match="interleaved heads"):
        parse(info).rule("0.strange", 2)


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
