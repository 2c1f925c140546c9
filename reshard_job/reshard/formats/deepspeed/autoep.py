"""Read and make AutoEP's descriptions: experts are stacked into one tensor per weight, `[experts, ...]` (0.19.8).

Expert parallelism cuts the first dim, so that a rank holds `[experts / ep, ...]`. In the files of weights each expert
has its own slice, `PREFIX.w1.N`.
Sources: deepspeed/runtime/engine.py (`_save_moe_checkpoint`), checkpoint/autoep_affine.py, checkpoint/constants.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.tensors.geometry import strides_of
from reshard.topology import Topology

FOLDING = "folding"
"""Key of what each file says under tensor parallelism (deepspeed/checkpoint/constants.py)."""
KEYS = ("ds_autoep_layers", "autoep_layers")
WEIGHTS = ("w1", "w2", "w3")
PARTITIONED, PER_EXPERT = "zero3_partitioned", "per_expert_files"
"""Values of `checkpoint_format`: at ZeRO-3 experts are in the optimizer's files only; else each has a file."""
_MOST_EXPERTS = 1 << 16
"""Experts in a layer: far more than models have, and few enough to list them."""


def read_layers(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the descriptions of the layers of experts in a model file; empty if there are none."""
    layers = next((value[key] for key in KEYS if value.get(key)), ())
    return layers if isinstance(layers, list) else ()


def find_stacks(
    layers: Sequence[Mapping[str, Any]], path: str, *, zero: int = 1
) -> tuple[dict[str, int], dict[int, str], int]:
    """Find the parameters that are stacks of experts, in files of a ZeRO stage.

    Returns:
        Name of a parameter -> experts in it; number of a layer in the names of its files -> prefix of its parameters;
        and the degree of expert parallelism.

    Raises:
        CorruptSourceError: a number is none of experts.
        UnsupportedError: experts are not spread evenly and in order over the ranks, or layers have several degrees.
    """
    counts: dict[str, int] = {}
    prefixes: dict[int, str] = {}
    degrees: set[int] = set()
    for layer in layers:
        count, ep, prefix = layer["num_experts"], layer["ep_size"], str(layer["expert_key_prefix"])
        if any(type(number) is not int or not 0 < number <= _MOST_EXPERTS for number in (count, ep)):
            found = f"found num_experts={count!r:.40} and ep_size={ep!r:.40}"
            raise UnsupportedError(f"{prefix}: expected whole numbers from 1 to {_MOST_EXPERTS}, {found}", path=path)
        placement = layer.get("expert_placement") or _make_placement(count, ep)
        if count % ep or placement != _make_placement(count, ep):
            raise UnsupportedError(
                f"{prefix}: its {count} experts are not spread evenly and in order over ep={ep}", path=path
            )
        saved, expected = layer.get("checkpoint_format", PER_EXPERT), PARTITIONED if zero == 3 else PER_EXPERT
        if saved != expected or layer.get("checkpoint_format_version") not in (None, 1):
            raise UnsupportedError(
                f"{prefix}: experts in the format {saved!r} of version {layer.get('checkpoint_format_version')} at ZeRO"
                f" stage {zero}, expected {expected!r} of version 1",
                path=path,
            )
        counts |= {f"{prefix}.{weight}": count for weight in WEIGHTS}
        prefixes[int(layer["moe_layer_id"])] = prefix
        degrees.add(ep)
    if len(degrees) != 1:
        raise UnsupportedError(f"its layers of experts have the degrees {sorted(degrees)}", path=path)
    return counts, prefixes, degrees.pop()


def read_degree(layers: Sequence[Mapping[str, Any]]) -> int:
    """Return the degree of expert parallelism that the first description states; 1 if there is none."""
    degree = layers[0].get("ep_size") if layers and isinstance(layers[0], Mapping) else None
    return degree if isinstance(degree, int) and degree > 0 else 1


def find_part(topology: Topology, dp: int, tp: int) -> tuple[int, int]:
    """Return the part of the experts that a rank holds, and the rank's number among those that hold it.

    Under tensor parallelism, each rank has whole experts, and neighbouring ranks have different parts
    (deepspeed/module_inject/auto_ep_folding.py, `expected_folding_group_tables`).
    """
    rank = dp * topology.tp + tp
    return rank % topology.ep, rank // topology.ep


def list_holders(topology: Topology, part: int) -> range:
    """Return the ranks `dp * topology.tp + tp` that hold a part of the experts; ZeRO-3 partitions it over them."""
    return range(part, topology.dp * topology.tp, topology.ep)


def list_writers(topology: Topology, part: int) -> dict[int, int]:
    """Return the tensor-parallel ranks that save the experts of a part, each with its first data-parallel rank."""
    writers: dict[int, int] = {}
    for dp in range(min(topology.dp, topology.ep)):
        for tp in range(topology.tp):
            if find_part(topology, dp, tp)[0] == part:
                writers.setdefault(tp, dp)
    return dict(sorted(writers.items()))


def make_folding(topology: Topology, dp: int, tp: int, family: str, **fields: Any) -> dict[str, Any]:
    """Make `folding`, which files of AutoEP with tensor parallelism say about the rank that saved them.

    `family` is `dense` in model files, `zero_optimizer_state` in the optimizer's, and `routed_expert` in those of
    experts. `fields` replace others. Source: deepspeed/checkpoint/autoep_universal.py, `make_folding_metadata`.
    """
    part, own = find_part(topology, dp, tp)
    is_expert = family == "routed_expert"
    group = {"dense": "dense_dp", "zero_optimizer_state": "per_family", "routed_expert": "edp"}[family]
    return {
        "version": 1,
        "tp_size": topology.tp,
        "tp_rank": tp,
        "ep_size": topology.ep,
        "ep_rank": part,
        "etp_size": 1,
        "etp_rank": 0,
        "zero_partition_group": group,
        "zero_partition_rank": own if is_expert else dp,
        "zero_partition_count": topology.dp * topology.tp // topology.ep if is_expert else topology.dp,
        "dispatch_strategy": "route_full_partition_dispatch",
        "shared_expert_placement": "tp_sharded",
        "family": family,
        **fields,
    }


def list_families(names: Iterable[str]) -> dict[str, str]:
    """Return the kind of each parameter, as `folding` states it (engine.py, `_autoep_param_family`)."""
    kinds = (
        (".experts.", "routed_expert"),
        (".router.", "router_gate_replicated"),
        (".shared_experts", "shared_expert"),
    )
    return {name: next((kind for key, kind in kinds if key in name), "dense") for name in names}


def list_partitions(names: Iterable[str], topology: Topology, dp: int, tp: int) -> dict[str, dict[str, Any]]:
    """Return how each parameter is partitioned, as `folding` in the file of a rank's optimizer states it."""
    _, own = find_part(topology, dp, tp)
    experts = {"group": "edp", "rank": own, "count": topology.dp * topology.tp // topology.ep}
    others = {"group": "dense_dp", "rank": dp, "count": topology.dp}
    return {
        name: {
            "family": family,
            **{
                f"zero_partition_{key}": value
                for key, value in (experts if family == "routed_expert" else others).items()
            },
        }
        for name, family in list_families(names).items()
    }


def find_stack(name: str, expert: int, path: str) -> str:
    """Return the name of the stack that a tensor in an expert's file is a slice of.

    Raises:
        CorruptSourceError: the name is that of another expert.
    """
    stack, _, number = name.rpartition(".")
    if number != str(expert):
        raise CorruptSourceError(f"holds {name}, expected a name that ends in .{expert}", path=path)
    return stack


def refuse_frozen(name: str, path: str) -> NoReturn:
    """Raise UnsupportedError for experts that are in no optimizer, which would state the shape of a rank's stacks."""
    raise UnsupportedError(
        f"has frozen experts of AutoEP, such as {name}: they are not converted",
        path=path,
        hint="resume in the topology that it was saved in",
    )


def convert_layers(
    layers: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], topology: Topology, rank: int = 0
) -> list[dict[str, Any]]:
    """Return the descriptions for another topology as a data-parallel rank saves them.

    Args:
        layers: descriptions of the source.
        shapes: of whole tensors, by name.
        topology: of the target.
        rank: among all ranks of the stage; below ZeRO-3 only the first data-parallel ranks save descriptions.
    """
    ep, zero3 = topology.ep, topology.zero == 3
    num_ranks = topology.dp * topology.tp
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
            "ep_rank": rank % ep,
            "expert_data_parallel_rank": rank // ep,
            "expert_data_parallel_world_size": num_ranks // ep,
            "global_expert_start": rank % ep * (count // ep),
            "global_expert_end": (rank % ep + 1) * (count // ep),
            "checkpoint_format": PARTITIONED if zero3 else PER_EXPERT,
            "checkpoint_format_version": 1 if zero3 else None,
        }
        known = layer.keys() | ({"checkpoint_format", "checkpoint_format_version"} if zero3 else set())
        described.append({**layer, **{key: value for key, value in replaced.items() if key in known}})
    return described


def make_partition_groups(
    groups: Sequence[Sequence[str]], stacked: Iterable[str], topology: Topology, dp: int, tp: int
) -> list[dict[str, Any]]:
    """Make `ds_zero_partition_groups`, which says over which ranks each sub-group of ZeRO-3 is partitioned.

    Experts are partitioned over all ranks that hold the same part of them, other parameters over the data-parallel
    ranks of one tensor-parallel rank.

    Args:
        groups: names of the parameters of each sub-group.
        stacked: names of the stacks of experts.
        topology: of the files.
        dp: data-parallel rank that saves it.
        tp: tensor-parallel rank that saves it.
    """
    stacks, made = {*stacked}, []
    part, own = find_part(topology, dp, tp)
    for at, names in enumerate(groups):
        is_expert = bool(names) and names[0] in stacks
        ranks = list_holders(topology, part) if is_expert else range(tp, topology.dp * topology.tp, topology.tp)
        made.append(
            {
                "sub_group": at,
                "partition_count": len(ranks),
                "partition_rank": own if is_expert else dp,
                "partition_ranks": list(ranks),
                "families": ["autoep_expert" if is_expert else "replicated"],
                "group_names": [f"ep_size_{topology.ep}" if is_expert else "replicated"],
            }
        )
    return made


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
