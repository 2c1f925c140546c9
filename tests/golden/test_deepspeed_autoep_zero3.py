"""AutoEP with AutoTP at ZeRO-3: over which ranks experts are partitioned, what files say of it, what is refused."""

import shutil
from pathlib import Path

import pytest

from reshard.api import plan_of, reshard
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.golden.files import STEP, edit, golden

NAME = "autoep-tp3-dp2-ep2-zero3"
MODEL, OPTIMIZER = (f"zero_pp_rank_{{}}_mp_rank_{{:02d}}_{kind}_states.pt" for kind in ("model", "optim"))


def test_experts_are_partitioned_over_all_ranks_of_their_part(tmp_path):
    """`tests/engine/test_reshard_experts.py` lets DeepSpeed load such files, which compares this."""
    reshard(golden("autoep-tp2-dp2-ep2"), tmp_path / STEP, Topology.parse("tp=2,dp=4,ep=4,zero=3"))
    assert not list((tmp_path / STEP).glob("layer_*"))
    model = read(tmp_path / STEP / MODEL.format(2, 1)).value  # rank 5 of 8: the second part
    (layer, _), folding = model["ds_autoep_layers"], model["folding"]
    assert layer["checkpoint_format"] == "zero3_partitioned"
    assert (layer["ep_rank"], layer["expert_data_parallel_rank"]) == (1, 1)
    assert (folding["tp_rank"], folding["ep_rank"], folding["zero_partition_rank"]) == (1, 1, 2)
    assert "block0.experts.w1" not in folding["param_families"]
    optimizer = read(tmp_path / STEP / OPTIMIZER.format(2, 1)).value
    assert (optimizer["folding"]["family"], optimizer["folding"]["ep_rank"]) == ("zero_optimizer_state", 1)
    assert "param_families" not in optimizer["folding"]
    dense, experts = optimizer["optimizer_state_dict"]["ds_zero_partition_groups"]
    assert (dense["partition_ranks"], dense["partition_rank"]) == ([1, 3, 5, 7], 2)
    assert (experts["partition_ranks"], experts["partition_rank"]) == ([1, 5], 1)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            MODEL.format(1, 2),
            lambda value: value["folding"].update(zero_partition_rank=0),
            "'zero_partition_rank': 0.*expected.*'zero_partition_rank': 1",
        ),
        (OPTIMIZER.format(1, 2), lambda value: value.pop("folding"), "folding is None"),
        (
            OPTIMIZER.format(1, 2),
            lambda value: value["optimizer_state_dict"]["ds_zero_partition_groups"][-1].update(partition_ranks=[1, 5]),
            "ds_zero_partition_groups",
        ),
    ],
)
def test_files_of_other_ranks_are_refused(tmp_path, name, change, text):
    folder = Path(shutil.copytree(golden(NAME), tmp_path / STEP))
    edit(folder, name, change)
    with pytest.raises(CorruptSourceError, match=text):
        read_checkpoint(folder, None)


def test_frozen_experts_are_refused(tmp_path):
    folder = Path(shutil.copytree(golden(NAME), tmp_path / STEP))

    def freeze(value):
        value["frozen_param_shapes"]["block1.experts.w3"] = value["param_shapes"][-1].pop("block1.experts.w3")

    edit(folder, MODEL.format(0, 0), freeze)
    with pytest.raises(UnsupportedError, match=r"frozen experts of AutoEP, such as block1\.experts\.w3"):
        read_checkpoint(folder, None)


def test_universal_folder_is_refused():
    with pytest.raises(UnsupportedError, match="convert it to zero=1 first"):
        plan_of(read_checkpoint(golden(NAME), None), Topology(), target_format="universal")
