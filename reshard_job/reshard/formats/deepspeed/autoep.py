"""Read and make AutoEP's descriptions: experts are stacked into one tensor per weight, `[experts, ...]` (0.19.8).

Expert parallelism cuts the first dim, so that a rank holds `[experts / ep, ...]`. In the files of weights each expert
has its own slice, `PREFIX.w1.N`.
Sources: deepspeed/runtime/engine.py (`_save_moe_checkpoint`), checkpoint/autoep_affine.py, checkpoint/constants.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.tensors.geometry import strides_of

KEYS = ("ds_autoep_layers", "autoep_layers")
WEIGHTS = ("w1", "w2", "w3")


def read_layers(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the descriptions of the layers of experts in a model file; empty if there are none."""
    layers = next((value[key] for key in KEYS if value.get(key)), ())
    return layers if isinstance(layers, list) else ()


def find_stacks(layers: Sequence[Mapping[str, Any]], path: str) -> tuple[dict[str, int], dict[int, str], int]:
    """Find the parameters that are stacks of experts.

    Returns:
        Name of a parameter -> experts in it; number of a layer in the names of its files -> prefix of its parameters;
        and the degree of expert parallelism.

    Raises:
        UnsupportedError: experts are not spread evenly and in order over the ranks, or layers have several degrees.
    """
    counts: dict[str, int] = {}
    prefixes: dict[int, str] = {}
    degrees: set[int] = set()
    for layer in layers:
        count, ep, prefix = int(layer["num_experts"]), int(layer["ep_size"]), str(layer["expert_key_prefix"])
        placement = layer.get("expert_placement") or _make_placement(count, ep)
        if count % ep or placement != _make_placement(count, ep):
            raise UnsupportedError(
                f"{prefix}: its {count} experts are not spread evenly and in order over ep={ep}", path=path
            )
        if layer.get("checkpoint_format", "per_expert_files") != "per_expert_files":
            raise UnsupportedError(f"{prefix}: experts in the format {layer['checkpoint_format']!r}", path=path)
        counts |= {f"{prefix}.{weight}": count for weight in WEIGHTS}
        prefixes[int(layer["moe_layer_id"])] = prefix
        degrees.add(ep)
    if len(degrees) != 1:
        raise UnsupportedError(f"its layers of experts have the degrees {sorted(degrees)}", path=path)
    return counts, prefixes, degrees.pop()


def find_stack(name: str, expert: int, path: str) -> str:
    """Return the name of the stack that a tensor in an expert's file is a slice of.

    Raises:
        CorruptSourceError: the name is that of another expert.
    """
    stack, _, number = name.rpartition(".")
    if number != str(expert):
        raise CorruptSourceError(f"holds {name}, expected a name that ends in .{expert}", path=path)
    return stack


def convert_layers(
    layers: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], ep: int, dp: int
) -> list[dict[str, Any]]:
    """Return the descriptions for another degree as the first rank saves them; `shapes` are those of whole tensors."""
    described = []
    for layer in layers:
        count, prefix = int(layer["num_experts"]), layer["expert_key_prefix"]
        maps = {f"{prefix}.{weight}": _make_map(shapes[f"{prefix}.{weight}"], ep) for weight in WEIGHTS}
        replaced = {
            "num_local_experts": count // ep,
            "ep_size": ep,
            "expert_placement": _make_placement(count, ep),
            "affine_maps": {"version": 1, "params": maps},
            "ep_group_name": f"ep_size_{ep}",
            "ep_rank": 0,
            "expert_data_parallel_rank": 0,
            "expert_data_parallel_world_size": dp // ep,
            "global_expert_start": 0,
            "global_expert_end": count // ep,
        }
        described.append({**layer, **{key: value for key, value in replaced.items() if key in layer}})
    return described


def _make_placement(count: int, ep: int) -> dict[str, Any]:
    own = count // ep
    ranks = [{"rank": rank, "experts": list(range(rank * own, (rank + 1) * own))} for rank in range(ep)]
    return {"version": 1, "num_experts": count, "ep_size": ep, "ranks": ranks}


def _make_map(shape: tuple[int, ...], ep: int) -> dict[str, Any]:
    """Make the affine map of a tensor that is cut evenly along its first dim."""
    shard, strides = [shape[0] // ep, *shape[1:]], list(strides_of(shape))
    ranks = {
        rank: {
            "shard_shape": list(shard),
            "pieces": [
                {
                    "shape": list(shard),
                    "source": [rank * shard[0] * strides[0], list(strides)],
                    "dest": [0, list(strides)],
                    "locations": [rank],
                }
            ],
        }
        for rank in range(ep)
    }
    return {"logical_shape": list(shape), "ranks": ranks}
