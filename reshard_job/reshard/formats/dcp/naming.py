"""Which entry is what: weights, optimizer states, options, and the rest.

A state dict is a tree that its user made: the model may be under `model`, under `app.model` or at the top, the
optimizer's part may be nested (`state`, name, `exp_avg`) or flattened (`state.<name>.exp_avg`). What an entry is
follows from the paths of all entries together; where that leaves two possibilities, the checkpoint is refused. Source
of the forms: torch/distributed/checkpoint/state_dict.py (`get_model_state_dict`, `get_optimizer_state_dict`,
`_flatten_optim_state_dict`) of torch 2.13 and torchtitan's `checkpoint.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import UnsupportedError
from reshard.formats.dcp.metadata import Entry, Path_
from reshard.tensors.layout import TensorKey

_STATE = "state"
_GROUPS = "param_groups"
_MODEL = "model"
_COMPILED = "_orig_mod"
"""What torch.compile puts before the names of a module's parameters; the names of optimizer states are without."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What every entry is; keys are flat names of entries.

    Attributes:
        model: container of the weights.
        optimizer: container of the optimizer's part, or None where there is none.
        tensors: weights and optimizer states.
        values: optimizer states that are objects, not tensors.
        grouped: options by group and name, where groups are listed; `params` among them.
        named: options by parameter and name, where they are flattened.
        groups: the one object that holds all groups (torch before 2.4), or None.
        rest: of neither model nor optimizer.
    """

    model: Path_
    optimizer: Path_ | None
    tensors: Mapping[str, TensorKey]
    values: Mapping[str, TensorKey]
    grouped: Mapping[str, tuple[int, str]]
    named: Mapping[str, tuple[str, str]]
    groups: str | None
    rest: tuple[str, ...]


def find_names(entries: Sequence[Entry], where: str) -> Naming:
    """Work out what each entry is.

    Raises:
        UnsupportedError: two possibilities, or none; with the entries that it is about.
    """
    containers = _optimizers(entries)
    if len(containers) > 1:
        raise UnsupportedError(
            f"has {len(containers)} optimizers: {', '.join(dotted(path) for path in sorted(containers, key=str))}",
            path=where,
            hint="one optimizer is converted: save each into a checkpoint of its own",
        )
    optimizer = next(iter(containers), None)
    inside: list[Entry] = []
    outside: list[Entry] = []
    for entry in entries:
        (inside if optimizer is not None and _under(entry, optimizer) else outside).append(entry)
    paths = [(entry, _tail(entry, optimizer)) for entry in inside] if optimizer is not None else []
    model = _model(outside, [tail for _, tail in paths if tail[0] == _STATE], where)
    weights = {_leaf(entry, model) for entry in outside if entry.is_tensor and _inside(entry, model)}
    return _sort(entries, _Parts(model, optimizer, frozenset(weights)), where)


def find_weights(entries: Sequence[Entry], where: str) -> tuple[Naming, list[Entry]]:
    """The same for the model's part alone, and the entries that are of no optimizer.

    Raises:
        UnsupportedError: the weights could be in several places, or are nowhere.
    """
    containers = _optimizers(entries)
    outside = [entry for entry in entries if not any(_under(entry, container) for container in containers)]
    return _sort(outside, _Parts(_model(outside, [], where), None, frozenset()), where), outside


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    model: Path_
    optimizer: Path_ | None
    weights: frozenset[str]


def _optimizers(entries: Sequence[Entry]) -> set[Path_]:
    """Containers that have `param_groups`; without recorded paths any dot may be a border."""
    found = set()
    for entry in entries:
        if len(entry.path) == 1:
            parts: Path_ = tuple(entry.key.split("."))
            borders = range(len(parts)) if parts[0] != _GROUPS else range(1)
        else:
            parts, borders = entry.path, range(len(entry.path))
        for at in borders:
            name = str(parts[at])
            if name == _GROUPS or name.startswith(_GROUPS + "."):
                found.add(parts[:at])
                break
    return found


def _under(entry: Entry, container: Path_) -> bool:
    """The entry is `state` or `param_groups` of the container, or below."""
    prefix = _prefix(container)
    rest = entry.key[len(prefix) :] if entry.key.startswith(prefix) else ""
    return rest == _GROUPS or rest.startswith((_STATE + ".", _GROUPS + "."))


def _tail(entry: Entry, container: Path_ | None) -> tuple[str, ...]:
    """(`state` or `param_groups`, and what follows): one part where it is flattened, else one for each step."""
    assert container is not None
    if len(entry.path) > 1 and entry.path[: len(container)] == container:
        parts = [str(part) for part in entry.path[len(container) :]]
        if parts[0] in (_STATE, _GROUPS):
            return tuple(parts)
        head, _, rest = parts[0].partition(".")
        return (head, ".".join((rest, *parts[1:])))
    head, _, rest = entry.key[len(_prefix(container)) :].partition(".")
    return (head, rest)


def _model(entries: Sequence[Entry], states: Sequence[tuple[str, ...]], where: str) -> Path_:
    """The container of the weights: the one that has a weight for every optimizer state."""
    leaves: dict[str, set[Path_]] = {}
    for entry in entries:
        if entry.is_tensor:
            leaves.setdefault(_plain(str(entry.path[-1])), set()).add(entry.path[:-1])
    every = set().union(*leaves.values()) if leaves else set()
    if not every:
        raise UnsupportedError(
            "holds no tensor outside of an optimizer: there are no weights",
            path=where,
            hint="name the folder with the weights (pytorch_model_fsdp_0 beside accelerate's optimizer_0); torch loads"
            " this one at any number of ranks as it is"
            if states
            else "a model saved as one object (flatten_state_dict=False) holds no tensors that could be cut",
        )
    found, lost = set(every), ""
    for tail in states:
        names = [tail[1]] if len(tail) > 2 else list(_prefixes(tail[1]))
        having = set().union(*(leaves.get(name, set()) for name in names))
        if found and not found & having:
            lost = lost or ".".join(tail)
        found &= having
    if states and not found:
        found = _without_paths(entries, states)
    named = {path for path in found if path and path[-1] == _MODEL}
    if len(found) > 1 and len(named) == 1:
        found = named
    if len(found) == 1:
        return next(iter(found))
    if not found and all(len(tail) > 2 and tail[1].isdigit() for tail in states):
        raise UnsupportedError(
            f"optimizer states are numbered, not named: {'.'.join(states[0])}",
            path=where,
            hint="save with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or the model's part alone"
            " where only weights are wanted",
        )
    if not found:
        raise UnsupportedError(
            f"no weight belongs to the optimizer state {lost}: weights were looked for under "
            f"{', '.join(sorted(map(dotted, every))[:8])}",
            path=where,
            hint="save model and optimizer with get_state_dict of torch.distributed.checkpoint.state_dict",
        )
    raise UnsupportedError(
        f"the weights could be any of {', '.join(sorted(dotted(path) or 'the top' for path in found))}",
        path=where,
        hint="name the model's part of the state dict 'model'",
    )


def _without_paths(entries: Sequence[Entry], states: Sequence[tuple[str, ...]]) -> set[Path_]:
    """The same where no paths are recorded: what is before the names in the keys."""
    found: set[str] | None = None
    keys = [entry.key.split(".") for entry in entries if entry.is_tensor]
    before: dict[str, set[str]] = {}
    for parts in keys:
        for at in range(len(parts)):
            if at == 0 or parts[at - 1] != _COMPILED:
                before.setdefault(_plain(".".join(parts[at:])), set()).add(".".join(parts[:at]))
    for tail in states:
        having: set[str] = set().union(*(before.get(name, set()) for name in _prefixes(".".join(tail[1:]))))
        found = having if found is None else found & having
    return {tuple(path.split(".")) if path else () for path in found or ()}


def _prefixes(dotted: str) -> Iterable[str]:
    parts = dotted.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _inside(entry: Entry, container: Path_) -> bool:
    if len(entry.path) > 1 or not container:
        return entry.path[:-1] == container
    return entry.key.startswith(_prefix(container))


def _leaf(entry: Entry, container: Path_) -> str:
    whole = str(entry.path[-1]) if len(entry.path) > 1 or not container else entry.key[len(_prefix(container)) :]
    return _plain(whole)


def _plain(name: str) -> str:
    """A parameter's name without what torch.compile puts into it, of the whole model or of a part."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def _sort(entries: Sequence[Entry], parts: _Parts, where: str) -> Naming:
    tensors: dict[str, TensorKey] = {}
    values: dict[str, TensorKey] = {}
    grouped: dict[str, tuple[int, str]] = {}
    named: dict[str, tuple[str, str]] = {}
    whole: str | None = None
    rest: list[str] = []
    problems: list[str] = []
    for entry in entries:
        if parts.optimizer is not None and _under(entry, parts.optimizer):
            tail = _tail(entry, parts.optimizer)
            if tail in ((_GROUPS,), (_GROUPS, "")):
                whole = entry.key
                continue
            if tail[0] == _GROUPS and (at := _listed(tail)) is not None:
                grouped[entry.key] = at
                continue
            splits = _splits(tail, parts.weights)
            if len(splits) != 1:
                problems.append(_explain(entry.key, splits))
            elif tail[0] == _GROUPS:
                named[entry.key] = splits[0]
            else:
                (tensors if entry.is_tensor else values)[entry.key] = TensorKey(splits[0][1], splits[0][0])
        elif entry.is_tensor and _inside(entry, parts.model):
            tensors[entry.key] = TensorKey("weight", _leaf(entry, parts.model))
        elif entry.is_tensor and len(entry.path) > 1 and _plain(str(entry.path[-1])) in parts.weights:
            tensors[entry.key] = TensorKey(dotted(entry.path[:-1]), _plain(str(entry.path[-1])))  # of an average
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
    )


def _listed(tail: tuple[str, ...]) -> tuple[int, str] | None:
    """(group, option) of `param_groups`, number, option; None where it is by parameter."""
    if len(tail) > 2 and tail[1].isdigit():
        return int(tail[1]), ".".join(tail[2:])
    return None


def _splits(tail: tuple[str, ...], weights: frozenset[str]) -> list[tuple[str, str]]:
    """(weight, what of it): all ways to read an entry of the optimizer."""
    if len(tail) > 2:
        return [(tail[1], ".".join(tail[2:]))] if tail[1] in weights else []
    return [(name, tail[1][len(name) + 1 :]) for name in _prefixes(tail[1]) if name in weights]


def _explain(key: str, splits: list[tuple[str, str]]) -> str:
    if not splits:
        return f"{key}: no weight of that name"
    return f"{key}: " + " or ".join(f"{what} of {name}" for name, what in splits)


def dotted(path: Path_) -> str:
    """The flat name of a path."""
    return ".".join(map(str, path))


def _prefix(path: Path_) -> str:
    return f"{dotted(path)}." if path else ""
