"""Classify the entries of a state dict: weights, optimizer states, options, and the rest.

The user chooses the tree of a state dict: the model may be under `model`, under `app.model` or at the top; the
optimizer's part may be nested (`state`, name, `exp_avg`) or flattened (`state.<name>.exp_avg`). The class of an entry
follows from the paths of all entries together. If that leaves two possibilities, the checkpoint is refused. Source
of the forms: torch/distributed/checkpoint/state_dict.py (`get_model_state_dict`, `get_optimizer_state_dict`,
`_flatten_optim_state_dict`) of torch 2.13, torchtitan's `checkpoint.py`, and megatron/core/optimizer/
distrib_optimizer.py (`sharded_param_state_fsdp_dtensor`) and transformer/fsdp_dtensor_checkpoint.py of Megatron-Core
0.16.1, whose optimizer names parameters with more wrappers (`module.`) than the model does, and has the options of
gated layers only once for both halves.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import UnsupportedError
from reshard.formats.dcp.metadata import Entry, StatePath
from reshard.tensors.layout import TensorKey

_STATE = "state"
_GROUPS = "param_groups"
_OPTIONS_BY_PARAMETER = "param_to_group_meta"
"""Key of the options of each parameter, which Megatron-FSDP saves in place of `param_groups`."""
_WRAPPER, _MOST_WRAPPERS = "module.", 3
_HALVES = ("_w", "_v")
"""Ends of the names of both halves of a gated layer, gate and up."""
_HEADS = (_STATE, _GROUPS, _OPTIONS_BY_PARAMETER)
_MODEL = "model"
_COMPILED = "_orig_mod"
"""Name that torch.compile inserts before a module's parameters; names of optimizer states do not have it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The class of every entry; keys are flat names of entries.

    Attributes:
        model: container of the weights.
        optimizer: container of the optimizer's part; None if there is no optimizer.
        tensors: weights and optimizer states.
        values: optimizer states that are objects, not tensors.
        grouped: (group, option) of entries of listed groups; `params` is one of the options.
        named: (parameter, option) of entries of flattened groups.
        halves: second half of a gated layer -> first half, to which `named` gives the options of both.
        groups: the one entry that holds all groups (torch before 2.4), or None.
        rest: entries that belong to neither model nor optimizer.
    """

    model: StatePath
    optimizer: StatePath | None
    tensors: Mapping[str, TensorKey]
    values: Mapping[str, TensorKey]
    grouped: Mapping[str, tuple[int, str]]
    named: Mapping[str, tuple[str, str]]
    groups: str | None
    rest: tuple[str, ...]
    halves: Mapping[str, str] = dataclasses.field(default_factory=dict)


def find_names(entries: Sequence[Entry], where: str) -> Naming:
    """Classify each entry.

    Raises:
        UnsupportedError: an entry could be several things, or nothing known; lists the entries.
    """
    containers = _find_optimizers(entries)
    if len(containers) > 1:
        raise UnsupportedError(
            f"has {len(containers)} optimizers: {', '.join(flat_name(path) for path in sorted(containers, key=str))}",
            path=where,
            hint="one optimizer is converted: save each into a checkpoint of its own",
        )
    optimizer = next(iter(containers), None)
    inside: list[Entry] = []
    outside: list[Entry] = []
    for entry in entries:
        (inside if optimizer is not None and _is_optimizer_entry(entry, optimizer) else outside).append(entry)
    tails = [] if optimizer is None else [_split_tail(entry, optimizer) for entry in inside]
    model, wrappers = _find_model_and_wrappers(outside, tails, where)
    weights = {_find_leaf_name(entry, model) for entry in outside if entry.is_tensor and _is_inside(entry, model)}
    return _classify_entries(entries, _Containers(model, optimizer, frozenset(weights), wrappers), where)


def find_weights(entries: Sequence[Entry], where: str) -> tuple[Naming, list[Entry]]:
    """Classify the entries that are of no optimizer.

    Returns:
        The classes, and these entries.

    Raises:
        UnsupportedError: the weights could be in several places, or are nowhere.
    """
    containers = _find_optimizers(entries)
    outside = [entry for entry in entries if not any(_is_optimizer_entry(entry, container) for container in containers)]
    return _classify_entries(outside, _Containers(_find_model(outside, [], where), None, frozenset()), where), outside


@dataclasses.dataclass(frozen=True, slots=True)
class _Containers:
    model: StatePath
    optimizer: StatePath | None
    weights: frozenset[str]
    wrappers: int | None = None


def _find_model_and_wrappers(
    entries: Sequence[Entry], tails: Sequence[tuple[str, ...]], where: str
) -> tuple[StatePath, int | None]:
    """Find the container of the weights, and how many wrappers more Megatron-FSDP's optimizer has in names; else None.

    Raises:
        UnsupportedError: there is no such container, or there are several.
    """
    states = [tail for tail in tails if tail[0] == _STATE]
    if not any(tail[0] == _OPTIONS_BY_PARAMETER for tail in tails):
        return _find_model(entries, states, where), None
    weights = {_strip_compiled(str(entry.path[-1])) for entry in entries if entry.is_tensor}
    problems: list[tuple[int, UnsupportedError]] = []
    for count in range(_MOST_WRAPPERS + 1):
        tails = [_unwrap(tail, count) for tail in states]
        try:
            return _find_model(entries, tails, where), count
        except UnsupportedError as error:
            problems.append((sum(tail[1] in weights for tail in tails), error))
    raise max(problems, key=lambda problem: problem[0])[1]  # of the number that fits most states


def _unwrap(tail: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the tail with the name that the model has for the parameter, and `param_groups` for its options."""
    head = _GROUPS if tail[0] == _OPTIONS_BY_PARAMETER else tail[0]
    return (head, tail[1].removeprefix(_WRAPPER * count), *tail[2:])


def _find_optimizers(entries: Sequence[Entry]) -> set[StatePath]:
    """Find the containers that have `param_groups` or options by parameter.

    If no paths are recorded, each dot of a key may end a container.
    """
    containers = set()
    for entry in entries:
        if len(entry.path) == 1:
            parts: StatePath = tuple(entry.key.split("."))
            borders = range(len(parts)) if parts[0] not in _HEADS[1:] else range(1)
        else:
            parts, borders = entry.path, range(len(entry.path))
        for at in borders:
            name = str(parts[at])
            if name.partition(".")[0] in _HEADS[1:]:
                containers.add(parts[:at])
                break
    return containers


def _is_optimizer_entry(entry: Entry, container: StatePath) -> bool:
    """Return True if the entry is `param_groups` of the container, or below that, its `state`, or its options."""
    prefix = _flat_prefix(container)
    rest = entry.key[len(prefix) :] if entry.key.startswith(prefix) else ""
    return rest == _GROUPS or rest.startswith(tuple(f"{head}." for head in _HEADS))


def _split_tail(entry: Entry, container: StatePath | None) -> tuple[str, ...]:
    """Split the path of an optimizer's entry, without its container.

    Returns:
        `state`, `param_groups` or `param_to_group_meta`, and the rest: one string if flattened, else one per level.
    """
    assert container is not None
    if len(entry.path) > 1 and entry.path[: len(container)] == container:
        parts = [str(part) for part in entry.path[len(container) :]]
        if parts[0] in _HEADS:
            return tuple(parts)
        head, _, rest = parts[0].partition(".")
        return (head, ".".join((rest, *parts[1:])))
    head, _, rest = entry.key[len(_flat_prefix(container)) :].partition(".")
    return (head, rest)


def _find_model(entries: Sequence[Entry], states: Sequence[tuple[str, ...]], where: str) -> StatePath:
    """Find the container of the weights: the one that has a weight for every optimizer state.

    Raises:
        UnsupportedError: there is no such container, or there are several.
    """
    leaves: dict[str, set[StatePath]] = {}
    for entry in entries:
        if entry.is_tensor:
            leaves.setdefault(_strip_compiled(str(entry.path[-1])), set()).add(entry.path[:-1])
    containers = set().union(*leaves.values()) if leaves else set()
    if not containers:
        raise UnsupportedError(
            "holds no tensor outside of an optimizer: there are no weights",
            path=where,
            hint="name the folder above that holds the weights too, or the one with the weights (accelerate's"
            " pytorch_model_fsdp_0 beside optimizer_0); torch loads this one at any number of ranks as it is"
            if states
            else "a model saved as one object (flatten_state_dict=False) holds no tensors that could be cut",
        )
    candidates, orphan = set(containers), ""
    for tail in states:
        names = [tail[1]] if len(tail) > 2 else list(_list_prefixes(tail[1]))
        holders = set().union(*(leaves.get(name, set()) for name in names))
        if candidates and not candidates & holders:
            orphan = orphan or ".".join(tail)
        candidates &= holders
    if states and not candidates:
        candidates = _find_model_by_keys(entries, states)
    named = {path for path in candidates if path and path[-1] == _MODEL}
    if len(candidates) > 1 and len(named) == 1:
        candidates = named
    if len(candidates) == 1:
        return next(iter(candidates))
    if not candidates and all(len(tail) > 2 and tail[1].isdigit() for tail in states):
        raise UnsupportedError(
            f"optimizer states are numbered, not named: {'.'.join(states[0])}",
            path=where,
            hint="save with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or the model's part alone"
            " where only weights are wanted",
        )
    if not candidates:
        raise UnsupportedError(
            f"no weight belongs to the optimizer state {orphan}: weights were looked for under "
            f"{', '.join(sorted(map(flat_name, containers))[:8])}",
            path=where,
            hint="save model and optimizer with get_state_dict of torch.distributed.checkpoint.state_dict",
        )
    raise UnsupportedError(
        f"the weights could be any of {', '.join(sorted(flat_name(path) or 'the top' for path in candidates))}",
        path=where,
        hint="name the model's part of the state dict 'model'",
    )


def _find_model_by_keys(entries: Sequence[Entry], states: Sequence[tuple[str, ...]]) -> set[StatePath]:
    """Find the containers that have every weight, if no paths are recorded: what the keys have before the names."""
    candidates: set[str] | None = None
    keys = [entry.key.split(".") for entry in entries if entry.is_tensor]
    before: dict[str, set[str]] = {}
    for parts in keys:
        for at in range(len(parts)):
            if at == 0 or parts[at - 1] != _COMPILED:
                before.setdefault(_strip_compiled(".".join(parts[at:])), set()).add(".".join(parts[:at]))
    for tail in states:
        holders: set[str] = set().union(*(before.get(name, set()) for name in _list_prefixes(".".join(tail[1:]))))
        candidates = holders if candidates is None else candidates & holders
    return {tuple(path.split(".")) if path else () for path in candidates or ()}


def _list_prefixes(dotted: str) -> Iterable[str]:
    parts = dotted.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _is_inside(entry: Entry, container: StatePath) -> bool:
    if len(entry.path) > 1 or not container:
        return entry.path[:-1] == container
    return entry.key.startswith(_flat_prefix(container))


def _find_leaf_name(entry: Entry, container: StatePath) -> str:
    whole = str(entry.path[-1]) if len(entry.path) > 1 or not container else entry.key[len(_flat_prefix(container)) :]
    return _strip_compiled(whole)


def _strip_compiled(name: str) -> str:
    """Remove what torch.compile inserts into the name of a parameter."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def _classify_entries(entries: Sequence[Entry], parts: _Containers, where: str) -> Naming:
    tensors: dict[str, TensorKey] = {}
    values: dict[str, TensorKey] = {}
    grouped: dict[str, tuple[int, str]] = {}
    named: dict[str, tuple[str, str]] = {}
    whole: str | None = None
    rest: list[str] = []
    problems: list[str] = []
    for entry in entries:
        if parts.optimizer is not None and _is_optimizer_entry(entry, parts.optimizer):
            tail = _split_tail(entry, parts.optimizer)
            tail = _unwrap(tail, parts.wrappers) if parts.wrappers is not None and len(tail) > 1 else tail
            if tail in ((_GROUPS,), (_GROUPS, "")):
                whole = entry.key
                continue
            if tail[0] == _GROUPS and (at := _parse_listed_option(tail)) is not None:
                grouped[entry.key] = at
                continue
            splits = _find_splits(tail, parts)
            if len(splits) != 1:
                problems.append(_explain(entry.key, splits))
            elif tail[0] == _GROUPS:
                named[entry.key] = splits[0]
            else:
                (tensors if entry.is_tensor else values)[entry.key] = TensorKey(splits[0][1], splits[0][0])
        elif entry.is_tensor and _is_inside(entry, parts.model):
            tensors[entry.key] = TensorKey("weight", _find_leaf_name(entry, parts.model))
        elif entry.is_tensor and len(entry.path) > 1 and _strip_compiled(str(entry.path[-1])) in parts.weights:
            tensors[entry.key] = TensorKey(
                flat_name(entry.path[:-1]), _strip_compiled(str(entry.path[-1]))
            )  # of an average
        else:
            rest.append(entry.key)
    twice = [str(key) for key, count in Counter(tensors.values()).items() if count > 1]
    problems += [f"{key} is there more than once" for key in twice]
    if problems:
        raise UnsupportedError(f"cannot tell what {len(problems)} entries are", path=where, problems=problems[:20])
    return Naming(
        model=parts.model,
        optimizer=parts.optimizer,
        tensors=tensors,
        values=values,
        grouped=grouped,
        named=named,
        groups=whole,
        rest=tuple(rest),
        halves={
            name.removesuffix(_HALVES[0]) + _HALVES[1]: name
            for name in {name for name, _ in named.values()}
            if parts.wrappers is not None and _has_halves(name.removesuffix(_HALVES[0]), parts.weights)
        },
    )


def _parse_listed_option(tail: tuple[str, ...]) -> tuple[int, str] | None:
    """Parse (`param_groups`, group, option) to (group, option); return None if the option is stored by parameter."""
    if len(tail) > 2 and tail[1].isdigit():
        return int(tail[1]), ".".join(tail[2:])
    return None


def _find_splits(tail: tuple[str, ...], parts: _Containers) -> list[tuple[str, str]]:
    """Find all ways to read an optimizer's entry as (weight, state or option)."""
    if len(tail) > 2:
        readings = [(tail[1], ".".join(tail[2:]))]
    else:
        readings = [(name, tail[1][len(name) + 1 :]) for name in _list_prefixes(tail[1])]
    if parts.wrappers is not None and tail[0] == _GROUPS:
        readings = [(name + _HALVES[0] if _has_halves(name, parts.weights) else name, what) for name, what in readings]
    return [(name, what) for name, what in readings if name in parts.weights]


def _has_halves(name: str, weights: frozenset[str]) -> bool:
    """Return True if the parameter is that of a gated layer, of which the halves are weights of their own."""
    return name not in weights and all(name + half in weights for half in _HALVES)


def _explain(key: str, splits: list[tuple[str, str]]) -> str:
    if not splits:
        return f"{key}: no weight of that name"
    return f"{key}: " + " or ".join(f"{what} of {name}" for name, what in splits)


def flat_name(path: StatePath) -> str:
    """Join a path to the flat name that DCP gives it."""
    return ".".join(map(str, path))


def _flat_prefix(path: StatePath) -> str:
    return f"{flat_name(path)}." if path else ""
