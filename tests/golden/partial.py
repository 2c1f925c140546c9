"""A golden checkpoint whose norms are partial parameters: every tensor-parallel rank has trained a copy by itself."""

import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reshard.formats.pt.reader import read
from reshard.tensors.cast import cast
from tests.golden.files import LAYER, MODEL, OPTIMIZER, edit, golden

NORMS = r"^\d+\.(attention_norm|ffn_norm|norm)$"
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def declare(folder: Path, key: str = "parameter_to_average_patterns") -> None:
    """Let the checkpoint declare its norms under this key of `universal_checkpoint_info` alone."""

    def change(value: dict) -> None:
        info = value["universal_checkpoint_info"]
        info["tp_replicated_parameter_patterns"] = []
        info[key] = [NORMS]

    for number in range(len(list(folder.glob("mp_rank_*")))):
        edit(folder, MODEL.format(number), change)


def names_of(folder: Path, mp: int) -> dict[str, int]:
    """Norms of a rank and their numbers of elements, in the order of their flat group."""
    return {name: shape[0] for name, shape in read(folder / MODEL.format(mp)).value["param_shapes"][1].items()}


def diverge(folder: Path, ranks: Sequence[int] = (1, 3), *, seed: int = 3) -> None:
    """Let some ranks of `pipeline-tp2-pp2` have other norms than the others: masters, moments and weights."""
    for mp in ranks:
        sizes = names_of(folder, mp)
        random = np.random.default_rng(seed + mp)
        masters = np.zeros(0, np.float32)

        def change_optimizer(value: dict, random: np.random.Generator = random) -> None:
            nonlocal masters
            state = value["optimizer_state_dict"]
            flat = {"fp32": state["single_partition_of_fp32_groups"][1]}
            flat |= {key: state["base_optimizer_state"]["state"][1][key] for key in STATES[1:]}
            for key, tensor in flat.items():
                values = np.frombuffer(tensor.storage.data, np.float32).copy()
                values += random.normal(size=len(values)).astype(np.float32) * np.float32(1e-3)
                values = np.abs(values) if key == "exp_avg_sq" else values
                tensor.storage.data = values.tobytes()
                masters = values if key == "fp32" else masters

        edit(folder, OPTIMIZER.format(mp), change_optimizer)
        start = 0
        for name, size in sizes.items():
            layer, leaf = name.split(".")
            own = masters[start : start + size].tobytes()
            start += size

            def change_weight(value: dict, leaf: str = leaf, own: bytes = own) -> None:
                value[leaf].storage.data = own

            edit(folder, LAYER.format(int(layer), mp % 2), change_weight)


def partial(folder: Path, *, differs: bool = True) -> Path:
    """Copy the golden pipeline with tp=2 and pp=2, and declare its norms; let their copies differ."""
    shutil.copytree(golden("pipeline-tp2-pp2"), folder)
    declare(folder)
    if differs:
        diverge(folder)
    return folder


def flip(folder: Path, name: str, position: int) -> None:
    """Flip a bit of a file in place."""
    with open(folder / name, "r+b") as file:
        file.seek(position)
        (byte,) = struct.unpack("B", file.read(1))
        file.seek(position)
        file.write(struct.pack("B", byte ^ 0x10))


def zero0(folder: Path, name: str, *, seed: int = 5) -> Path:
    """Make the golden checkpoint `name` of ZeRO-0 one of two ranks, each of which has trained all parameters alone.

    The second rank's states and masters are changed; its weights are its masters, rounded, or the changed weights.
    """
    shutil.copytree(golden(name), folder)
    shutil.copyfile(folder / MODEL.format(0), folder / MODEL.format(1))
    random = np.random.default_rng(seed)

    def disturb(content: bytes) -> bytes:
        values = np.frombuffer(content, np.float32)
        return (values + random.normal(size=len(values)).astype(np.float32) * np.float32(0.01)).tobytes()

    def change(value: dict, rank: int) -> None:
        value["mp_world_size"] = 2
        value["checkpoint_parallel_dimensions"]["tp_degree"] = 2
        value["universal_checkpoint_info"] = {
            "universal_checkpoint_version": 0.2,
            "parameter_to_average_patterns": [".*"],
            "parameter_with_row_parallelism_patterns": ["none"],
        }
        if not rank:
            return
        optimizer = value["optimizer"]
        inner = optimizer.get("optimizer_state_dict", optimizer)
        for state in inner["state"].values():
            for key in STATES[1:]:
                state[key].storage.data = disturb(state[key].storage.data)
        names = [key for key in value["module"] if key not in ("scale", "head.weight")]
        if "fp32_groups" not in optimizer:
            for key in names:
                value["module"][key].storage.data = disturb(value["module"][key].storage.data)
            return
        masters = [tensor for group in optimizer["fp32_groups"] for tensor in group]
        matrices = [key for key in names if key in ("embed.weight", "up.weight", "down.weight")]
        for key, master in zip([*matrices, *(key for key in names if key not in matrices)], masters, strict=True):
            master.storage.data = disturb(master.storage.data)
            bits = np.frombuffer(master.storage.data, np.uint32)
            value["module"][key].storage.data = cast(bits, "float32", "bfloat16").tobytes()

    for rank in range(2):
        edit(folder, MODEL.format(rank), lambda value, rank=rank: change(value, rank))
    return folder
