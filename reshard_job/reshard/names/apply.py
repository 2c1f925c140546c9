"""Apply a name map to a checkpoint's index. Only the shard table changes: parts of tensors are boxes, no byte moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from reshard.errors import UnsupportedError
from reshard.names import boxes
from reshard.names.match import Job, check_targets, match
from reshard.names.rules import NameMap
from reshard.names.tensors import TensorRows, cut, put_together
from reshard.tensors.layout import Index, LogicalTensor, ParamGroup, TensorKey
from reshard.tensors.shard_table import ShardTable

MARK = "#"
"""Begins a suffix of a tensor's name, such as `#padding`. A renamed parameter keeps its suffix."""


def rename(index: Index, name_map: NameMap) -> Index:
    """Return a checkpoint's index with the names that a map gives.

    The map applies to all states of a parameter (weight, master weight, moments), to the optimizer's groups and to the
    second names of tied weights. `extra` is left out, because it refers to the old names.

    Raises:
        UnsupportedError: the map is no bijection for this checkpoint. Lists every name that no rule or several rules
            match, that two tensors would have, whose parts are missing, or whose sizes do not add up.
    """
    problems: list[str] = []
    names = dict.fromkeys(_parameter(tensor.key) for tensor in index.tensors)
    names |= dict.fromkeys(name for group in index.groups for name in group.names)  # also of states that are left out
    jobs = match(names, name_map, problems)
    targets = check_targets(jobs.values(), problems)
    aliases = _aliases(index, name_map, jobs, targets, problems)
    groups = tuple(_group(group, jobs, problems) for group in index.groups)
    tensors, shards, renamed = _tensors(index, jobs, problems)
    averaged = _averaged(index, jobs, problems)
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise UnsupportedError(
            f"the name map does not fit the checkpoint {index.root}",
            path=name_map.path or None,
            problems=[*problems[:20], *more],
            hint="every tensor needs one rule, also those that are to be dropped: see docs/name-maps.md",
        )
    return dataclasses.replace(
        index,
        tensors=tensors,
        shards=shards,
        groups=groups,
        aliases=dict(sorted(aliases.items())),
        extra=None,
        free_copies={key: index.free_copies[own] for key, own in renamed.items() if own and own in index.free_copies},
        rank_local=_rank_local(index, jobs),
        averaged=averaged,
        renamed=renamed,
    )


def _parameter(key: TensorKey) -> str:
    return key.name.partition(MARK)[0]


def _tensors(
    index: Index, jobs: Mapping[str, Job], problems: list[str]
) -> tuple[tuple[LogicalTensor, ...], ShardTable, dict[TensorKey, TensorKey | None]]:
    """Return the renamed tensors, their rows, and `Index.renamed`."""
    lookup = _TensorLookup(index)
    tensors: list[LogicalTensor] = []
    tables: list[ShardTable] = []
    renamed: dict[TensorKey, TensorKey | None] = {}
    number = np.full(len(index.tensors), -1, dtype=np.int64)  # new number of tensors that only get another name
    done: set[tuple[str, str]] = set()
    wrong = _ProblemsByState()
    for at, tensor in enumerate(index.tensors):
        name, mark, suffix = tensor.key.name.partition(MARK)
        job = jobs.get(name)
        if job is None or not job.targets:
            continue
        if job.rule.is_rename:
            number[at] = len(tensors)
            key = TensorKey(tensor.key.state, job.targets[0] + mark + suffix)
            tensors.append(dataclasses.replace(tensor, key=key))
            renamed[key] = index.own_key(tensor.key)
        elif mark:
            wrong.add(tensor.key.state, f"{tensor.key}: padding of a tensor that {job.rule} cuts or puts together")
        elif (tensor.key.state, job.sources[0]) not in done:
            done.add((tensor.key.state, job.sources[0]))
            for made in lookup.make(job, tensor.key.state, wrong):
                tables.append(boxes.renumber(made.rows, len(tensors)))
                tensors.append(made.tensor)
                renamed[made.tensor.key] = None
    problems += wrong.to_lines()
    kept = boxes.select_rows(index.shards, np.flatnonzero(number[index.shards.tensor] >= 0))
    kept = dataclasses.replace(kept, tensor=number[kept.tensor])
    num_dims = max([1, *(len(tensor.shape) for tensor in tensors)])
    return tuple(tensors), boxes.join([kept, *tables], num_dims), renamed


def _rank_local(index: Index, jobs: Mapping[str, Job]) -> frozenset[TensorKey]:
    """Return `Index.rank_local` in the new names; parts of such a tensor, and what it is joined into, are such."""
    local: set[TensorKey] = set()
    for key in index.rank_local:
        name, mark, suffix = key.name.partition(MARK)
        targets = jobs[name].targets if name in jobs else ()
        local |= {TensorKey(key.state, target + mark + suffix) for target in targets}
    return frozenset(local)


def _averaged(index: Index, jobs: Mapping[str, Job], problems: list[str]) -> dict[TensorKey, int]:
    """Return `Index.averaged` in the new names; parts of a tensor that is a mean are means."""
    averaged: dict[TensorKey, int] = {}
    for key, count in index.averaged.items():
        name, mark, suffix = key.name.partition(MARK)
        job = jobs.get(name)
        if job is None:
            continue
        sources = [TensorKey(key.state, source + mark + suffix) for source in job.sources]
        if apart := [source.name for source in sources if source not in index.averaged]:
            problems.append(f"{apart[0]} and {name}: only the second is a mean of copies, {job.rule} joins them")
        averaged |= {TensorKey(key.state, target + mark + suffix): count for target in job.targets}
    return averaged


class _ProblemsByState:
    """Problems of tensors. A rule that does not fit a parameter fits none of its states, and is reported once."""

    def __init__(self) -> None:
        self._problems: dict[str, dict[str, str]] = {}

    def add(self, state: str, problem: str) -> None:
        """Add a problem of a tensor of this state."""
        self._problems.setdefault(problem.replace(f"{state}/", ""), {})[state] = problem

    def to_lines(self) -> list[str]:
        """Return one line for each problem, in the order in which they were added."""
        return [
            next(iter(by_state.values())) if len(by_state) == 1 else f"{problem} ({', '.join(by_state)})"
            for problem, by_state in self._problems.items()
        ]


class _TensorLookup:
    """Looks up tensors by state and name, with their rows."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._rows = index.shards.by_tensor(len(index.tensors))
        self._at = {tensor.key: at for at, tensor in enumerate(index.tensors)}
        self._ndim: dict[str, int] = {}
        for tensor in index.tensors:
            self._ndim[tensor.key.name] = max(len(tensor.shape), self._ndim.get(tensor.key.name, 0))

    def make(self, job: Job, state: str, wrong: _ProblemsByState) -> list[TensorRows]:
        """Make the target tensors of a job for one state; add what does not fit to `wrong`."""
        missing = [name for name in job.sources if TensorKey(state, name) not in self._at]
        if missing:
            present = next(name for name in job.sources if name not in missing)
            wrong.add(state, f"{state}/{missing[0]}: not there, {state}/{present} is: {job.rule} needs both")
            return []
        sources = [self._find(TensorKey(state, name)) for name in job.sources]
        # A scalar state of a parameter with dims (`step`) belongs to every part of it, and every part has the same.
        scalar = all(not source.tensor.shape for source in sources) and all(self._ndim[name] for name in job.sources)
        keys = [TensorKey(state, name) for name in job.targets]
        try:
            make = put_together if job.rule.joins else cut
            return make(job.rule, sources, keys, scalar=scalar)
        except ValueError as error:
            wrong.add(state, str(error))
            return []

    def _find(self, key: TensorKey) -> TensorRows:
        at = self._at[key]
        return TensorRows(self._index.tensors[at], boxes.select_rows(self._index.shards, self._rows[at]).boxes())


def _aliases(
    index: Index, name_map: NameMap, jobs: Mapping[str, Job], targets: Mapping[str, Job], problems: list[str]
) -> dict[str, str]:
    """Return the second names of tied weights after the map: second name to name."""
    untied = dict(name_map.untied)
    problems += [
        f"{second}: the map unties it from {untied[second]}, it is {name}"
        for second, name in index.aliases.items()
        if untied.get(second, name) != name
    ]
    kept = {second: name for second, name in index.aliases.items() if second not in untied}
    second_jobs = match(kept, name_map, problems)
    aliases: dict[str, str] = {}
    for second, name in kept.items():
        job, of = second_jobs.get(second), jobs.get(name)
        if job is None or of is None or not job.targets:
            continue
        if not (job.rule.is_rename and of.rule.is_rename):
            problems.append(f"{second} is {name}: of tied weights, neither may be cut, put together or dropped alone")
            continue
        _add_alias(aliases, job.targets[0], of.targets[0], targets, problems)
    for second, name in name_map.tied:
        if name not in targets:
            problems.append(f"{second}: the map ties it to {name}, which is no tensor after the map")
        else:
            _add_alias(aliases, second, name, targets, problems)
    return aliases


def _add_alias(
    aliases: dict[str, str], second: str, name: str, targets: Mapping[str, Job], problems: list[str]
) -> None:
    if second in targets or aliases.setdefault(second, name) != name:
        other = ", ".join(targets[second].sources) if second in targets else aliases[second]
        problems.append(f"{second}: second name of {name}, and made of {other}")


def _group(group: ParamGroup, jobs: Mapping[str, Job], problems: list[str]) -> ParamGroup:
    """Return a parameter group in the new names; joined parts take the place of the first of them."""
    names: dict[str, None] = {}
    own = set(group.names)
    for name in group.names:
        job = jobs.get(name)
        if job is None:
            continue
        if apart := [other for other in job.sources if other not in own]:
            problems.append(f"{apart[0]} and {name}: in different parameter groups, {job.rule} puts them together")
        names |= dict.fromkeys(job.targets)
    return dataclasses.replace(group, names=tuple(names))
