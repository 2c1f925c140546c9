"""AutoEP: experts stacked into one tensor for each weight, `[experts, ...]`, cut along its first dim (0.19.8).

On a rank the tensor is `[experts / ep, ...]`; in the files of weights each expert has its own slice, `PREFIX.w1.N`.
Sources: deepspeed/runtime/engine.py (`_save_moe_checkpoint`), checkpoint/autoep_affine.py, checkpoint/constants.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.tensors.geometry import strides_of

KEYS = ("ds_autoep_layers", "autoep_layers")
WEIGHTS = ("w1", "w2", "w3")


def layers_of(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Descriptions of the layers of experts in a model file; empty where there are none."""
    found = next((value[key] for key in KEYS if value.get(key)), ())
    return found if isinstance(found, list) else ()


def stacked_names(layers: Sequence[Mapping[str, Any]], path: str) -> tuple[dict[str, int], dict[int, str], int]:
    """Which parameters are stacks of experts.

    Returns:
        Name of a parameter -> experts in it; number of a layer in the names of its files -> prefix of its parameters;
        and the degree of expert parallelism.

    Raises:
        UnsupportedError: experts that are spread otherwise than evenly and in order, or of several degrees.
    """
    counts: dict[str, int] = {}
    prefixes: dict[int, str] = {}
    degrees: set[int] = set()
    for layer in layers:
        count, ep, prefix = int(layer["num_experts"]), int(layer["ep_size"]), str(layer["expert_key_prefix"])
        placement = layer.get("expert_placement") or _placement(count, ep)
        if count % ep or placement != _placement(count, ep):
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


def split_name(name: str, expert: int, path: str) -> str:
    """Name of the stack that a tensor in an expert's file is a slice of.

    Raises:
        CorruptSourceError: a name of another expert.
    """
    stack, _, number = name.rpartition(".")
    if number != str(expert):
        raise CorruptSourceError(f"holds {name}, expected a name that ends in .{expert}", path=path)
    return stack


def layers_at(
    layers: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], ep: int, dp: int
) -> list[dict[str, Any]]:
    """The descriptions as true for another degree, as the first rank saves them; `shapes` are whole ones."""
    found = []
    for layer in layers:
        count, prefix = int(layer["num_experts"]), layer["expert_key_prefix"]
        maps = {f"{prefix}.{weight}": _map(shapes[f"{prefix}.{weight}"], ep) for weight in WEIGHTS}
        replaced = {
            "num_local_experts": count // ep,
            "ep_size": ep,
            "expert_placement": _placement(count, ep),
            "affine_maps": {"version": 1, "params": maps},
            "ep_group_name": f"ep_size_{ep}",
            "ep_rank": 0,
            "expert_data_parallel_rank": 0,
            "expert_data_parallel_world_size": dp // ep,
            "global_expert_start": 0,
            "global_expert_end": count // ep,
        }
        found.append({**layer, **{key: value for key, value in replaced.items() if key in layer}})
    return found


def _placement(count: int, ep: int) -> dict[str, Any]:
    own = count // ep
    ranks = [{"rank": rank, "experts": list(range(rank * own, (rank + 1) * own))} for rank in range(ep)]
    return {"version": 1, "num_experts": count, "ep_size": ep, "ranks": ranks}


def _map(shape: tuple[int, ...], ep: int) -> dict[str, Any]:
    """The affine map of a tensor that is cut evenly along its first dim."""
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
