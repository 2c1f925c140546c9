"""Read the common part of a Megatron-Core checkpoint: iteration, arguments, the optimizer's settings.

Source: megatron/core/dist_checkpointing/strategies/common.py of 0.16.1 (`common.pt`) and megatron/training/
checkpointing.py (`args`, `iteration`, `optimizer`). Later versions write an object `common_state` instead of the file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.formats.base import stated_topology
from reshard.formats.dcp.items import Items, to_plain
from reshard.formats.dcp.metadata import Entry
from reshard.formats.pt.objects import Inert
from reshard.formats.pt.reader import read
from reshard.tensors.layout import ParamGroup, Plain
from reshard.topology import Topology

COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
"""Key of the object that later versions write instead of the file."""

_BUCKET_SETTINGS = re.compile(
    r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.(?P<name>[^./]+)/shard_0_1"
)
_OF_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded")
_STEP = "step"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Facts from the common part.

    Attributes:
        step: iterations done; None if not stated.
        samples: global samples consumed; 0 if not stated.
        topology: topology of the run that saved the checkpoint; None if not stated.
        settings: options of each parameter group. The files do not say which parameter is in which group.
        sharding: layout of the distributed optimizer's states; empty if not stated.
        has_sequential_experts: states that experts are modules of their own, so not grouped in a layout of their own.
    """

    step: int | None = None
    samples: int = 0
    topology: Topology | None = None
    settings: tuple[Mapping[str, Plain], ...] = ()
    sharding: str = ""
    has_sequential_experts: bool = False


def read_common(folder: Path, entries: Iterable[Entry], items: Items) -> Common:
    """Read the common part from its file or object; facts that are absent keep their defaults.

    Raises:
        CorruptSourceError, UnsafePickleError, UnsupportedError: the file or object cannot be read.
    """
    stored = next((entry for entry in entries if entry.key == COMMON_KEY), None)
    if (folder / COMMON_FILE).is_file():
        value = read(folder / COMMON_FILE).value
    elif stored is not None:
        value = items.read_object(stored.key, stored.chunks[0][1])
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    else:
        value = {}
    fields = value if isinstance(value, Mapping) else {}
    args = fields.get("args")
    arguments = args.state if isinstance(args, Inert) and isinstance(args.state, Mapping) else {}
    content = fields.get("content_metadata")
    sharding = content.get("distrib_optim_sharding_type") if isinstance(content, Mapping) else ""
    samples = arguments.get("consumed_train_samples", 0)
    return Common(
        step=_to_integer(fields.get("iteration")),
        samples=samples if isinstance(samples, int) else 0,
        topology=_read_topology(arguments, str(folder)),
        settings=tuple(_iterate_settings(fields.get("optimizer"))),
        sharding=sharding if isinstance(sharding, str) else "",
        has_sequential_experts=arguments.get("moe_grouped_gemm") is False,
    )


def read_bucket_settings(
    entries: Iterable[Entry], items: Items
) -> tuple[Mapping[Any, Any], tuple[Mapping[str, Plain], ...]]:
    """Read the optimizer's fields that `dp_reshardable` stores for each data-parallel group.

    Returns:
        Fields by name, such as `optimizer` with its `param_groups`, or by the number of each optimizer of a chain; none
        if groups of ranks differ in them. And the settings of each parameter group of every group of ranks.
    """
    found: dict[Any, Any] = {}
    every: list[Mapping[str, Plain]] = []
    are_equal = True
    for entry in entries:
        match = _BUCKET_SETTINGS.fullmatch(entry.key)
        if entry.is_tensor or match is None or match["name"] in _OF_BUCKETS:
            continue
        value = items.read_object(entry.key, entry.chunks[0][1])
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        every += _iterate_settings({match["name"]: value})
        own = found if match["optimizer"] is None else found.setdefault(int(match["optimizer"]), {})
        are_equal = are_equal and own.setdefault(match["name"], value) == value
    return found if are_equal else {}, tuple(every)


def find_groups(settings: tuple[Mapping[str, Plain], ...], names: Iterable[str]) -> tuple[ParamGroup, ...]:
    """Merge all groups into one with the settings that all share: the files do not assign parameters to groups."""
    if not settings:
        return ()
    same = {
        key: value
        for key, value in settings[0].items()
        if all(key in other and other[key] == value for other in settings[1:])
    }
    step = same.pop(_STEP, None)
    scalars = {_STEP: step} if isinstance(step, int | float) else {}
    return (ParamGroup(names=tuple(names), options=same, scalars=scalars),)


def find_differing(settings: tuple[Mapping[str, Plain], ...]) -> tuple[str, ...]:
    """Find the settings that are not the same for all groups."""
    return tuple(
        sorted(
            {
                key
                for one in settings
                for key, value in one.items()
                if any(other.get(key) != value for other in settings)
            }
        )
    )


def _to_integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _read_topology(arguments: Mapping[str, Any], path: str) -> Topology | None:
    tp, pp = (_to_integer(arguments.get(f"{kind}_model_parallel_size")) for kind in ("tensor", "pipeline"))
    dp = _to_integer(arguments.get("data_parallel_size"))
    if tp is None or pp is None or dp is None:
        return None
    zero = 1 if arguments.get("use_distributed_optimizer") else 0
    return stated_topology(path, tp=tp, pp=pp, dp=dp, zero=zero)


def _iterate_settings(optimizer: Any) -> Iterable[Mapping[str, Plain]]:
    """Yield the settings of each group of the optimizer, or of each optimizer of a chain, at any level of wrappers."""
    if not isinstance(optimizer, Mapping):
        return
    groups = optimizer.get("param_groups")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, Mapping):
            yield {str(key): to_plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
    for key, value in optimizer.items():
        if key == "optimizer" or isinstance(key, int):
            yield from _iterate_settings(value)


def _is_plain(value: Any) -> bool:
    try:
        to_plain(value)
    except ValueError:
        return False
    return True
