"""The part of a Megatron-Core checkpoint that is not tensors: iteration, arguments, the optimizer's settings.

Source: megatron/core/dist_checkpointing/strategies/common.py of 0.16.1 (`common.pt`) and megatron/training/
checkpointing.py (`args`, `iteration`, `optimizer`). Later versions keep it as an object `common_state` instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.formats.base import stated_topology
from reshard.formats.dcp.items import Items, plain
from reshard.formats.dcp.metadata import Entry
from reshard.formats.pt.objects import Inert
from reshard.formats.pt.reader import read
from reshard.tensors.layout import ParamGroup, Plain
from reshard.topology import Topology

COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
"""Of the object that later versions have instead of the file."""

_STEP = "step"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What was found.

    Attributes:
        step: iterations done; None where it is not said.
        samples: global samples consumed; 0 where it is not said.
        topology: that it was written in; None where it is not said.
        settings: options of each parameter group. Which parameters are in which is not in the files.
        sharding: how the distributed optimizer's states are laid out; empty where it is not said.
    """

    step: int | None = None
    samples: int = 0
    topology: Topology | None = None
    settings: tuple[Mapping[str, Plain], ...] = ()
    sharding: str = ""


def read_common(folder: Path, entries: Iterable[Entry], items: Items) -> Common:
    """Read it, wherever it is; what is absent stays unknown.

    Raises:
        CorruptSourceError, UnsafePickleError, UnsupportedError: the file or object cannot be read.
    """
    stored = next((entry for entry in entries if entry.key == COMMON_KEY), None)
    if (folder / COMMON_FILE).is_file():
        value = read(folder / COMMON_FILE).value
    elif stored is not None:
        value = items.object(stored.key, stored.chunks[0][1])
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
        step=_integer(fields.get("iteration")),
        samples=samples if isinstance(samples, int) else 0,
        topology=_topology(arguments, str(folder)),
        settings=tuple(_settings(fields.get("optimizer"))),
        sharding=sharding if isinstance(sharding, str) else "",
    )


def find_groups(settings: tuple[Mapping[str, Plain], ...], names: Iterable[str]) -> tuple[ParamGroup, ...]:
    """All groups as one, with what is the same in all of them: which parameter is in which, the files do not say."""
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


def differing(settings: tuple[Mapping[str, Plain], ...]) -> tuple[str, ...]:
    """Settings that are not the same for all groups."""
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


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _topology(arguments: Mapping[str, Any], path: str) -> Topology | None:
    tp, pp = (_integer(arguments.get(f"{kind}_model_parallel_size")) for kind in ("tensor", "pipeline"))
    dp = _integer(arguments.get("data_parallel_size"))
    if tp is None or pp is None or dp is None:
        return None
    zero = 1 if arguments.get("use_distributed_optimizer") else 0
    return stated_topology(path, tp=tp, pp=pp, dp=dp, zero=zero)


def _settings(optimizer: Any) -> Iterable[Mapping[str, Plain]]:
    """`param_groups` of the optimizer, or of each of a chain, wherever the wrappers put them."""
    if not isinstance(optimizer, Mapping):
        return
    groups = optimizer.get("param_groups")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, Mapping):
            yield {str(key): plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
    for key, value in optimizer.items():
        if key == "optimizer" or isinstance(key, int):
            yield from _settings(value)


def _is_plain(value: Any) -> bool:
    try:
        plain(value)
    except ValueError:
        return False
    return True
