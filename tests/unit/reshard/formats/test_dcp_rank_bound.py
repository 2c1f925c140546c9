"""Which entries of a state dict belong to single ranks, and stay only where the ranks stay."""

from __future__ import annotations

import pytest

from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.writing.rank_bound import select_entries
from reshard.topology import Topology


def entry(key: str, dtype: str = "") -> Entry:
    return Entry(key=key, path=tuple(key.split(".")), shape=(3,) if dtype else None, dtype=dtype, chunks=())


@pytest.mark.parametrize(
    ("keys", "source", "target", "stays"),
    [
        (("dataloader.dp_rank_0", "dataloader.dp_rank_1"), "dp=2", "dp=3", False),
        (("dataloader.dp_rank_0", "dataloader.dp_rank_1"), "dp=2", "dp=1", False),
        (("dataloader.dp_rank_0", "dataloader.dp_rank_1"), "dp=2", "dp=2", True),
        (("dataloader.dp_rank_0", "dataloader.dp_rank_1"), "tp=2,dp=2", "tp=1,dp=2", True),
        (("dataloader.dp_rank_0", "dataloader.dp_rank_1"), "dp=4", "dp=2", True),  # files say 4 ranks, tp is not known
        (("dataloader.dp_rank_0", "dataloader.dp_rank_1"), "dp=2", "dp=4,cp=2", True),
        (("dataloader.dp_rank_0", "dataloader.dp_rank_1"), "dp=4", "dp=4", True),  # saved at tp=2,dp=2
        (("dataloader_rank_0", "dataloader_rank_1"), "dp=2", "dp=3", False),
        (("data.dp_rank_0.epoch", "data.dp_rank_1.epoch"), "dp=2", "dp=3", False),
        (("rng.rank_0", "rng.rank_1"), "dp=2", "dp=2", True),
        (("rng.rank_0", "rng.rank_1"), "dp=2,zero=2", "dp=2,zero=3", True),
        (("rng.rank_0", "rng.rank_1"), "dp=2", "tp=2", False),
        (("rng_rank0", "rng_rank1"), "dp=2", "dp=3", False),
        (("rng.tp_rank_0", "rng.tp_rank_1"), "tp=2", "tp=1,dp=2", False),
        (("rank.0", "rank.1"), "dp=2", "dp=3", False),
        (("lora_rank_8", "lora_rank_16"), "dp=2", "dp=3", True),  # numbers of ranks begin at 0
        (("layer.low_rank.0.at", "layer.low_rank.1.at"), "dp=2", "dp=3", True),
        (("lora_rank_0", "lora_rank_1", "adapter.lora-rank.0"), "dp=2", "dp=3", True),
        (("frank_0", "rank_0_norm", "rank", "ranks_0"), "dp=2", "dp=3", True),
    ],
)
def test_what_belongs_to_a_rank_stays_only_with_its_ranks(
    keys: tuple[str, ...], source: str, target: str, stays: bool
) -> None:
    entries = [entry("step"), *map(entry, keys)]
    kept, notes = select_entries(entries, Topology.parse(source), Topology.parse(target))
    assert [item.key for item in kept] == ["step", *(keys if stays else ())]
    assert bool(notes) is not stays
    assert all(", ".join(keys) in note for note in notes)


@pytest.mark.parametrize(("dtype", "stays"), [("float32", True), ("bfloat16", True), ("uint8", False)])
def test_averaged_weights_belong_to_no_rank_and_states_of_generators_do(dtype: str, stays: bool) -> None:
    entries = [entry(f"ema.rank.{number}", dtype) for number in range(2)]
    kept, _ = select_entries(entries, Topology(dp=2), Topology(dp=3))
    assert bool(kept) is stays
