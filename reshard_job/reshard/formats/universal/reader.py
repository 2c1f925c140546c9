"""Index a universal checkpoint: every file of a parameter's folder is one box, the whole tensor."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.commits.commit import Commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed import flat
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.reading.groups import plain
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra as NativeExtra
from reshard.formats.deepspeed.rows import Place, Rows
from reshard.formats.deepspeed.slots import held_runs
from reshard.formats.deepspeed.states import same_scalar
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile
from reshard.formats.universal.atoms import Atom, Atoms, check_shape, param_of, read_atoms
from reshard.formats.universal.hints import Hints
from reshard.formats.universal.names import MASTER, NAME, STEP, ZERO, atom_file, check_names
from reshard.formats.universal.source import UniversalContents, open_source
from reshard.tensors.layout import Checksum, Index, ParamGroup, SourceFile
from reshard.topology import Topology

TOPOLOGY = Topology(zero=1)
"""Of folders of DeepSpeed's own converter, which are laid out for no ranks."""

_MAX_PROBLEMS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """What the parameters of a group have in common.

    Attributes:
        dtypes: states that are tensors, `fp32` first, and their types.
        scalars: states that are one number, as saved, and the file that holds their bytes.
    """

    dtypes: Mapping[str, str]
    scalars: Mapping[str, tuple[Any, PtFile]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniversalExtra:
    """What the writer needs besides the tensors.

    Attributes:
        source: the files that are not atoms.
        params: every optimized parameter.
        hints: parameter -> what its atoms say about tensor parallelism; None where they say nothing.
        weights: what is not optimized (frozen, buffers).
        groups: states of each parameter group.
        commit_model: `Commit.model` of the source.
        tp: degree that the folder was laid out for, which the description of the vocabulary is true for.
    """

    source: UniversalContents
    params: Mapping[str, Param]
    hints: Mapping[str, Hints | None]
    weights: Mapping[str, Param]
    groups: tuple[GroupState, ...]
    commit_model: Mapping[str, Any]
    tp: int

    def native(self) -> NativeExtra:
        """See `reshard.formats.deepspeed.reading.reader.Describes`."""
        from reshard.formats.universal.native import native_extra  # only a native target needs it

        return native_extra(self)


def read_index(folder: Path, commit: Commit | None, told: Mapping[str, Any] | None = None) -> Index:
    """Index the checkpoint in `folder`.

    Args:
        folder: of the checkpoint.
        commit: its commit marker, if it has one.
        told: how tensors are cut (`pattern_file.load`), instead of what the checkpoint says about it.

    Raises:
        CorruptSourceError: atoms are missing, left over, damaged or of different steps; all of them are named.
        UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    source = open_source(folder, told)
    check_names((*source.shapes, *source.others), str(folder))
    atoms, problems = _read_all(source)
    problems += _left_over(source)
    groups = tuple(_group_state(source, number, atoms, problems) for number in range(len(source.groups)))
    rows = _AtomRows(source)
    params = {name: rows.add(name, atoms[name], problems) for name in source.shapes if name in atoms}
    weights = {name: rows.add_other(name, atoms[name]) for name in source.others if name in atoms}
    weights |= {name: rows.add_pieces(name) for name in _in_pieces(source) if name not in weights}
    if problems:
        raise CorruptSourceError(
            f"{len(problems)} things are wrong with its atoms",
            path=str(folder),
            problems=problems[:_MAX_PROBLEMS],
            hint="the conversion that made it did not end, or two are mixed in one folder: convert again",
        )
    found = source.model.value
    topology = commit.topology if commit is not None else source.made_for or TOPOLOGY
    return Index(
        root=folder,
        format=NAME,
        topology=topology,
        step=int(found["global_steps"]),
        samples=commit.samples if commit is not None else _int(found.get("global_samples")),
        tensors=tuple(rows.tensors),
        files=tuple(_source_file(path, file) for path, file in rows.files.items()),
        shards=rows.build(),
        groups=_param_groups(source, groups),
        aliases=source.aliases,
        extra=UniversalExtra(
            source=source,
            params={name: param for name, param in params.items() if param is not None},
            hints={name: atoms[name].states[MASTER].hints for name in params},
            weights=weights,
            groups=groups,
            commit_model=dict(commit.model) if commit is not None else {},
            tp=source.tp if source.made_for is None else topology.tp,
        ),
    )


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _read_all(source: UniversalContents) -> tuple[dict[str, Atoms], list[str]]:
    """Atoms of every parameter and of everything else that has some, and what is wrong with them."""
    found: dict[str, Atoms] = {}
    problems: list[str] = []
    for name in (*source.shapes, *source.others):
        if name in source.shapes or _needs_atoms(source, name) or (source.folder / ZERO / name).is_dir():
            try:
                found[name] = read_atoms(source.folder, name)
            except CorruptSourceError as error:
                problems += error.problems
        elif name in source.module:
            found[name] = _in_model_file(source, name)
    known = {*found, *source.stored, *_in_pieces(source)}
    if absent := [name for name in source.frozen if name not in known]:
        raise UnsupportedError(
            f"{len(absent)} frozen parameters, such as {absent[0]}, have neither atoms nor pieces in the model files",
            path=str(source.folder),
            hint="convert from the native checkpoint",
        )
    return found, problems


def _needs_atoms(source: UniversalContents, name: str) -> bool:
    """Not where a converter of DeepSpeed before 0.19 left what is not optimized in the model file, as it was saved."""
    return name in source.stored and (source.made_for is not None or name not in source.module)


def _in_pieces(source: UniversalContents) -> tuple[str, ...]:
    """Frozen parameters of ZeRO-3, which DeepSpeed's converter leaves in pieces in the model files."""
    pieces = source.ranks[0].value["frozen_param_fragments"] if source.ranks else ()
    return tuple(name for name in source.frozen if name in pieces)


def _in_model_file(source: UniversalContents, name: str) -> Atoms:
    """A buffer, which DeepSpeed's converter leaves where it was: of ZeRO-3, and before 0.19."""
    tensor = source.module[name]
    path = Path(source.model.path).name
    return Atoms(states={MASTER: Atom(file=source.model, path=path, tensor=tensor, hints={})}, step=None)


def _left_over(source: UniversalContents) -> list[str]:
    """Folders of parameters that the model files do not know are of another save."""
    known = {*source.shapes, *source.others, *source.aliases}
    found = sorted(item.name for item in (source.folder / ZERO).iterdir() if item.is_dir())
    return [f"{ZERO}/{name} belongs to no parameter that the model files know" for name in found if name not in known]


def _group_state(source: UniversalContents, number: int, atoms: Mapping[str, Atoms], problems: list[str]) -> GroupState:
    """What all parameters of a group have; those that lack something of it go to `problems`."""
    names = [name for name in source.groups[number] if name in atoms]
    dtypes: dict[str, str] = {}
    for name in names:
        for state, atom in sorted(atoms[name].states.items(), key=lambda item: item[0] != MASTER):
            dtypes.setdefault(state, atom.tensor.dtype)
    for name in names:
        problems += [f"{atom_file(name, state)} is missing" for state in dtypes if state not in atoms[name].states]
    return GroupState(dtypes=dtypes, scalars=_scalars(source, number, {name: atoms[name] for name in names}, problems))


def _scalars(
    source: UniversalContents, number: int, atoms: Mapping[str, Atoms], problems: list[str]
) -> dict[str, tuple[Any, PtFile]]:
    """`step` of a group: of its parameters, or as ZeRO-3 has it, of its states in the optimizer file."""
    steps = {name: found.step for name, found in atoms.items()}
    having = {name: step for name, step in steps.items() if step is not None}
    if not having:
        inner = source.optimizer.value.get("optimizer_state_dict")
        states = inner.get("state") if isinstance(inner, Mapping) else None
        own = states.get(source.first_states[number]) if isinstance(states, Mapping) else None
        return {
            str(key): (value, source.optimizer)
            for key, value in (own.items() if isinstance(own, Mapping) else ())
            if not isinstance(value, Tensor) or not value.shape
        }
    problems += [f"{atom_file(name, STEP)} is missing" for name in steps if name not in having]
    values = {name: same_scalar(value) for name, (value, _) in having.items()}
    usual, count = Counter(values.values()).most_common(1)[0]
    problems += [
        f"{atom_file(name, STEP)} is of another step than that of {count} others of group {number}"
        for name, value in values.items()
        if value != usual
    ]
    return {STEP: next(step for name, step in having.items() if values[name] == usual)}


class _AtomRows(Rows):
    """Collects tensors, rows and files."""

    def __init__(self, source: UniversalContents) -> None:
        super().__init__()
        self.files: dict[str, PtFile] = {}
        self._numbers: dict[str, int] = {}
        self._source = source

    def add(self, name: str, atoms: Atoms, problems: list[str]) -> Param | None:
        """Add all states of a parameter; what is wrong with them goes to `problems`."""
        try:
            param = param_of(self._source, name, atoms.states[MASTER])
        except CorruptSourceError as error:
            problems.append(f"{error.path}: {error.message}")
            return None
        for state, atom in atoms.states.items():
            try:
                self._add_atom(state, param, atom)
            except CorruptSourceError as error:
                problems.append(f"{error.path}: {error.message}")
        return param

    def add_other(self, name: str, atoms: Atoms) -> Param:
        """Add a frozen parameter or a buffer, whose only atom is the weight."""
        atom, shape = atoms.states[MASTER], atoms.states[MASTER].tensor.shape
        if self._source.tp > 1 and self._source.made_for is None:
            raise UnsupportedError(
                f"{name} is not optimized, and was saved at tp={self._source.tp}: DeepSpeed's converter keeps only the"
                " shard of the first tensor-parallel rank",
                path=str(self._source.folder / atom.path),
                hint="convert from the native checkpoint",
            )
        vocabulary = self._source.vocabulary_rows(name)
        rows = vocabulary[0] if vocabulary is not None and shape and shape[0] > vocabulary[0] else None
        param = Param(name=name, shape=shape, rule=WHOLE, rows=rows)
        self._add_atom("weight", param, atom)
        return param

    def add_pieces(self, name: str) -> Param:
        """Add a frozen parameter of ZeRO-3, of which each data-parallel rank's model file has a piece."""
        ranks = self._source.ranks
        for file in ranks:
            path = Path(file.path).name
            self._numbers.setdefault(path, len(self._numbers))
            self.files.setdefault(path, file)
        shape = tuple(self._source.model.value["frozen_param_shapes"][name])
        (slot,), length = flat.zero3_slots([math.prod(shape)], len(ranks))
        held = [(file, file.value.get("frozen_param_fragments") or {}) for file in ranks]
        numbers = {file.path: self._numbers[Path(file.path).name] for file in ranks}
        dtype, runs = held_runs(held, name, numbers, length=length, what=f"frozen parameter {name}")
        param = Param(name=name, shape=shape, rule=WHOLE)
        self.add_slots("weight", param, Place(1, 0, 0, 0, 0), runs, dtype=dtype, offset=0, size=slot.size)
        return param

    def _add_atom(self, state: str, param: Param, atom: Atom) -> None:
        strides = check_shape(param, atom)
        number = self._numbers.setdefault(atom.path, len(self._numbers))
        self.files.setdefault(atom.path, atom.file)
        place = Place(1, 0, 0, number, atom.tensor.file_offset)
        self.add_shard(state, param, place, dtype=atom.tensor.dtype, strides=strides)


def _source_file(path: str, file: PtFile) -> SourceFile:
    checksums = sorted(
        (storage.file_offset, storage.num_bytes, storage.crc32)
        for storage in file.storages.values()
        if storage.crc32 is not None and storage.num_bytes
    )
    return SourceFile(
        path=path,
        num_bytes=file.num_bytes,
        checksums=tuple(Checksum(start=start, num_bytes=count, crc32=crc) for start, count, crc in checksums),
    )


def _param_groups(source: UniversalContents, states: tuple[GroupState, ...]) -> tuple[ParamGroup, ...]:
    found = []
    for names, settings, state in zip(source.groups, source.settings, states, strict=True):
        options = plain({key: value for key, value in settings.items() if key != "params"}, source.optimizer)
        scalars: dict[str, int | float] = {}
        for key, (value, file) in state.scalars.items():
            number = plain({key: value}, file)
            assert isinstance(number, Mapping)
            if isinstance(numeric := number.get(key), int | float):
                scalars[key] = numeric
        assert isinstance(options, Mapping)
        found.append(ParamGroup(names=names, options=options, scalars=scalars))
    return tuple(found)
