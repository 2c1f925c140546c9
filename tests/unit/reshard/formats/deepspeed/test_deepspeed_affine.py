"""Affine maps that DeepSpeed itself makes: the rules must say the same, block by block."""

from importlib.util import find_spec

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.tensor_parallel.affine import check_map
from reshard.formats.deepspeed.tensor_parallel.rules import Rule

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup")


@pytest.fixture(scope="module")
def affine():
    from deepspeed.checkpoint import affine

    return affine


def test_contiguous_splits(affine):
    for dim, widths in ((0, (4, 4)), (1, (3, 5)), (2, (1, 2, 3))):
        shape = [8, 8, 6]
        entry = affine.contiguous_split_map(shape, widths, dim).to_dict()
        shards = [tuple(width if at == dim else size for at, size in enumerate(shape)) for width in widths]
        rule, whole = Rule(dim=dim).resolve("x", shards)
        check_map("x", entry, rule, whole, len(widths))
        wrong, _ = Rule(dim=dim).resolve("x", shards[::-1])
        if len(set(widths)) > 1:
            with pytest.raises(UnsupportedError, match="cuts"):
                check_map("x", entry, wrong, whole, len(widths))


def test_fused_parts(affine):
    widths = ((4, 4), (2, 2), (2, 2))
    entry = affine.sub_param_map((16, 8), (8, 4, 4), widths, 0).to_dict()
    rule, whole = Rule(dim=0, parts=(8, 4, 4)).resolve("x", [(8, 8), (8, 8)])
    check_map("x", entry, rule, whole, 2)
    with pytest.raises(UnsupportedError, match="cuts"):
        check_map("x", entry, Rule(dim=0, parts=(4, 8, 4)), whole, 2)
    with pytest.raises(UnsupportedError, match="cuts"):
        check_map("x", entry, Rule(dim=0), whole, 2)


def test_replicated(affine):
    entry = affine.replicated_map((3, 5), 2).to_dict()
    check_map("x", entry, Rule(dim=None), (3, 5), 2)
    with pytest.raises(UnsupportedError, match="cuts"):
        check_map("x", entry, Rule(dim=None), (3, 5), 3)
    with pytest.raises(UnsupportedError, match="scales"):
        check_map("x", affine.replicated_map((5,), 2, scale=0.5).to_dict(), Rule(dim=None), (5,), 2)


def test_blocks_that_recur_along_a_dim(affine):
    rule, whole = Rule(dim=1, parts=(6,), view=(4, 6, 8)).resolve("x", [(12, 8), (12, 8)])
    strides = (48, 8, 1)
    ranks = {
        rank: {
            "shard_shape": [12, 8],
            "pieces": [
                {
                    "shape": [4, 3, 8],
                    "source": [rank * 24, list(strides)],
                    "dest": [0, [24, 8, 1]],
                    "locations": [rank],
                }
            ],
        }
        for rank in (0, 1)
    }
    entry = {"logical_shape": [24, 8], "ranks": ranks}
    assert affine.ParamAffineMap.from_dict(entry).uncovered_offsets() == []
    check_map("x", entry, rule, whole, 2)
