"""Shards, partitions and slots put together are the tensor: nothing missing, nothing twice."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import flat, muon
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.matching import match_names
from reshard.formats.deepspeed.pipeline import balanced, uniform
from reshard.formats.deepspeed.rows import Place, Rows
from reshard.formats.deepspeed.tensor_parallel.rules import Rule
from reshard.tensors.layout import PADDING

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@st.composite
def params(draw):
    """A parameter with any rule, its tensor-parallel degree, and true rows if it is a vocabulary."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    ndim = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    dim = draw(st.one_of(st.none(), st.integers(0, ndim - 1)))
    rule = Rule(dim=dim)
    if dim is not None:
        rule = draw(rules(dim, tp))
        shape[dim] = sum(rule.parts) * rule.repeat * rule.unit
    rows = None
    if dim in (None, 0) and len(rule.parts) < 2 and rule.repeat == 1 and draw(st.booleans()) and shape[0] > 1:
        rows = draw(st.integers(1, shape[0] - 1))
    return Param(name="p", shape=tuple(shape), rule=rule, rows=rows), tp


@st.composite
def rules(draw, dim, tp):
    """Any cut along a dim: fused parts, evenly or not, that recur, of elements of any width."""
    parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    again = {"repeat": draw(st.integers(1, 2)), "unit": draw(st.integers(1, 2))}
    if draw(st.booleans()):
        return Rule(dim=dim, parts=tuple(part * tp for part in parts), **again)
    widths = [[draw(st.integers(0, part)) for _ in range(tp)] for part in parts]
    widths[0][0] += 1
    return Rule(dim=dim, parts=tuple(map(sum, widths)), widths=tuple(map(tuple, widths)), **again)


@given(params())
def test_pieces_of_all_ranks_tile_the_tensor(case):
    param, tp = case
    covered = np.zeros(param.shape, int)
    for rank in range(tp):
        shard = np.zeros(param.rule.shard_shape("p", param.shape, tp, rank), int)
        for local, whole, size in param.rule.box_pairs(param.shape, tp, rank):
            shard[tuple(slice(low, low + n) for low, n in zip(local, size, strict=True))] += 1
            covered[tuple(slice(low, low + n) for low, n in zip(whole, size, strict=True))] += 1
        assert (shard == 1).all()
    assert (covered == (tp if param.rule.dim is None else 1)).all()


@given(COUNTS, st.integers(1, 9), st.sampled_from([1, 4, 8]))
def test_partitions_hold_every_element_once_and_in_order(counts, dp, alignment):
    group = flat.FlatGroup(num_elements=tuple(counts), dp=dp, param_alignment=alignment)
    assert group.partition * dp >= group.used
    assert group.partition * dp - group.used < 2 * dp or group.used == 0
    seen = [0] * len(counts)
    for rank in range(dp):
        end = 0
        for span in group.spans(rank):
            assert span.start == seen[span.index]
            assert span.offset >= end
            assert rank * group.partition + span.offset == group.offsets[span.index] + span.start
            seen[span.index] = span.stop
            end = span.offset + span.stop - span.start
        assert end <= group.partition - group.padding(rank)
    assert seen == list(counts)
    assert all(offset % alignment == 0 for offset in group.offsets)


@given(COUNTS, st.integers(1, 9), st.sampled_from([1, 4, 8]))
def test_momentum_of_whole_parameters_is_at_every_rank_that_has_a_part(counts, dp, alignment):
    """As DeepSpeed walks over the parameters of a partition, one after the other."""
    group = flat.FlatGroup(num_elements=tuple(counts), dp=dp, param_alignment=alignment)
    copies = [0] * len(counts)
    for rank in range(dp):
        end = 0
        for span, part in zip(muon.locate_momentum(group, rank), group.spans(rank), strict=True):
            assert (span.index, span.start, span.stop, span.offset) == (part.index, 0, counts[part.index], end)
            assert muon.count_earlier_copies(group, rank, span.index) == copies[span.index]
            copies[span.index] += 1
            end += span.stop
        assert muon.count_momentum(group, rank) == end
    assert [found > 0 for found in copies] == [count > 0 for count in counts]


@given(COUNTS, st.integers(1, 9))
def test_zero3_slots_hold_every_element_once(counts, dp):
    slots, length = flat.zero3_slots(counts, dp)
    end = 0
    for slot, count in zip(slots, counts, strict=True):
        assert slot.offset == end
        assert (slot.size - 1) * dp < count <= slot.size * dp or slot.size == count == 0
        end += slot.size
    assert end == length


@given(COUNTS, st.integers(1, 9), st.integers(1, 60))
def test_sub_groups_are_a_cut_of_the_group(counts, dp, size):
    cuts = flat.zero3_sub_groups(counts, dp, size)
    assert [index for start, stop in cuts for index in range(start, stop)] == list(range(len(counts)))
    for start, stop in cuts[:-1]:
        assert sum(math.ceil(count / dp) for count in counts[start:stop]) >= size


@given(st.integers(0, 30), st.integers(1, 9))
def test_round_robin_is_a_permutation(count, dp):
    assert sorted(flat.round_robin(count, dp)) == list(range(count))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 6))
def test_stages_are_a_cut_of_the_layers(weights, parts):
    for bounds in (balanced(weights, parts), uniform(len(weights), parts)):
        assert len(bounds) == parts + 1
        assert bounds[0] == 0
        assert bounds[-1] == len(weights)
        assert list(bounds) == sorted(bounds)


@given(params(), st.integers(1, 5))
def test_rows_lead_to_the_bytes_of_the_right_elements(case, dp):
    """Cut a tensor as DeepSpeed does, follow the rows back: the tensor again, in every copy."""
    param, tp = case
    truth = np.arange(math.prod(param.shape), dtype=np.float32).reshape(param.shape)
    rows, files = Rows(), []
    for rank in range(tp):
        shape = param.rule.shard_shape("p", param.shape, tp, rank)
        shard = np.zeros(shape, np.float32)
        for local, whole, size in param.rule.box_pairs(param.shape, tp, rank):
            inside = tuple(slice(low, low + n) for low, n in zip(local, size, strict=True))
            shard[inside] = truth[tuple(slice(low, low + n) for low, n in zip(whole, size, strict=True))]
        group = flat.FlatGroup(num_elements=(shard.size,), dp=dp)
        buffer = np.zeros(group.partition * dp, np.float32)
        buffer[: shard.size] = shard.ravel()
        for replica in range(dp):
            for span in group.spans(replica):
                place = Place(tp, rank, 0, len(files), 100 + 4 * span.offset)
                rows.add_flat("fp32", param, place, dtype="float32", start=span.start, stop=span.stop)
            files.append(bytes(100) + buffer[replica * group.partition : (replica + 1) * group.partition].tobytes())
    table = rows.build()
    for number, own in enumerate(table.by_tensor(len(rows.tensors))):
        tensor = rows.tensors[number]
        cut = param.shape[0] if param.rows is None else param.rows
        expected = truth[cut:] if tensor.key.name.endswith(PADDING) else truth[:cut]
        copies = {}
        for at in own:
            row = table.row(int(at), len(tensor.shape))
            found = copies.setdefault(row.replica, np.full(tensor.shape, np.nan, np.float32))
            data = np.frombuffer(files[row.file], np.float32, offset=row.byte_offset)
            view = np.lib.stride_tricks.as_strided(data, row.box.size, [4 * stride for stride in row.strides])
            found[tuple(slice(low, high) for low, high in zip(row.box.offset, row.box.end, strict=True))] = view
        assert len(copies) == (tp if param.rule.dim is None else 1)
        for found in copies.values():
            assert (found == expected).all()


def resolved(rule, shards):
    """The same rule as a reader has it: before it has seen the shards."""
    known = rule.parts if len(rule.parts) > 1 or rule.repeat * rule.unit > 1 else ()
    view = (rule.repeat, sum(rule.parts), rule.unit) if rule.repeat * rule.unit > 1 else ()
    widths = rule.widths if known else ()
    return Rule(dim=1 if view else 0, parts=known, widths=widths, view=view).resolve("p", shards)


@given(st.sampled_from([1, 2, 3, 4]).flatmap(lambda tp: st.tuples(rules(0, tp), st.just(tp))))
def test_rule_follows_from_the_shapes_of_the_shards(case):
    rule, tp = case
    whole = (sum(rule.parts) * rule.repeat * rule.unit,)
    shards = [rule.shard_shape("p", whole, tp, rank) for rank in range(tp)]
    if rule.repeat * rule.unit > 1 and shards[0] == (0,):
        return  # no elements to tell the runs by
    found, shape = resolved(rule, shards)
    assert shape == whole
    assert [found.box_pairs(whole, tp, rank) for rank in range(tp)] == [
        rule.box_pairs(whole, tp, rank) for rank in range(tp)
    ]


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.sampled_from([(2,), (3,), (2, 3)])), min_size=1, max_size=9),
)
def test_names_are_matched_right_or_not_at_all(candidates):
    """Group -1 is that of parameters that are not optimized."""
    groups = [[shape for group, shape in candidates if group == own] for own in range(3)]
    names = [(f"p{at}", shape) for at, (_, shape) in enumerate(candidates)]
    try:
        found = match_names(groups, names, "file")
    except UnsupportedError as error:
        assert "more than one assignment" in str(error)
        return
    assert found == [[f"p{at}" for at, (group, _) in enumerate(candidates) if group == own] for own in range(3)]
