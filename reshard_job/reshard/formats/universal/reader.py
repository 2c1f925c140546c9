"""Index a universal checkpoint: every file of a parameter's folder is one box, the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.commits.commit import Commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed import flat
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.rows import Place, Rows
from reshard.formats.deepspeed.slots import locate_tensor
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE
from reshard.formats.pt.reader import PtFile
from reshard.formats.universal.atoms import Atom, Atoms, build_param, check_shape, read_atoms
from reshard.formats.universal.groups import read_group_state, read_param_groups
from reshard.formats.universal.names import MASTER, NAME, ZERO, check_names
from reshard.formats.universal.native import UniversalExtra
from reshard.formats.universal.source import UniversalContents, open_source
from reshard.tensors.layout import Checksum, Index, SourceFile
from reshard.topology import Topology

TOPOLOGY = Topology(zero=1)
"""Topology of folders that DeepSpeed's own converter made; they are not laid out for ranks."""

_MAX_PROBLEMS = 20


def read_index(folder: Path, commit: Commit | None, pattern_info: Mapping[str, Any] | None = None) -> Index:
    """Index the checkpoint in `folder`.

    Args:
        folder: of the checkpoint.
        commit: its commit marker, if it has one.
        pattern_info: how tensors are cut, from a pattern file (`pattern_file.load`); it replaces what the checkpoint
            says about it.

    Raises:
        CorruptSourceError: atoms are missing, left over, damaged or of different steps; the message lists them.
        UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    source = open_source(folder, pattern_info)
    check_names((*source.shapes, *source.others), str(folder))
    atoms, problems = _read_all_atoms(source)
    problems += _find_unknown_folders(source)
    groups = tuple(read_group_state(source, number, atoms, problems) for number in range(len(source.groups)))
    rows = _AtomRows(source)
    params = {name: rows.add(name, atoms[name], problems) for name in source.shapes if name in atoms}
    weights = {name: rows.add_other(name, atoms[name]) for name in source.others if name in atoms}
    weights |= {name: rows.add_fragments(name) for name in _list_fragmented(source) if name not in weights}
    if problems:
        raise CorruptSourceError(
            f"{len(problems)} things are wrong with its atoms",
            path=str(folder),
            problems=problems[:_MAX_PROBLEMS],
            hint="the conversion that made it did not end, or two are mixed in one folder: convert again",
        )
    model = source.model.value
    topology = commit.topology if commit is not None else source.made_for or TOPOLOGY
    return Index(
        root=folder,
        format=NAME,
        topology=topology,
        step=int(model["global_steps"]),
        samples=commit.samples if commit is not None else _int_or_zero(model.get("global_samples")),
        tensors=tuple(rows.tensors),
        files=tuple(_make_source_file(path, file) for path, file in rows.files.items()),
        shards=rows.build(),
        groups=read_param_groups(source, groups),
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


def _int_or_zero(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _read_all_atoms(source: UniversalContents) -> tuple[dict[str, Atoms], list[str]]:
    """Read the atoms of all parameters and of everything else that has atoms; return them and a list of problems."""
    atoms: dict[str, Atoms] = {}
    problems: list[str] = []
    for name in (*source.shapes, *source.others):
        if name in source.shapes or _is_atom_required(source, name) or (source.folder / ZERO / name).is_dir():
            try:
                atoms[name] = read_atoms(source.folder, name)
            except CorruptSourceError as error:
                problems += error.problems
        elif name in source.module:
            atoms[name] = _make_atoms(source, name)
    known = {*atoms, *source.stored, *_list_fragmented(source)}
    if absent := [name for name in source.frozen if name not in known]:
        raise UnsupportedError(
            f"{len(absent)} frozen parameters, such as {absent[0]}, have neither atoms nor pieces in the model files",
            path=str(source.folder),
            hint="convert from the native checkpoint",
        )
    return atoms, problems


def _is_atom_required(source: UniversalContents, name: str) -> bool:
    """Return whether a weight that is not optimized must have an atom.

    It needs none if DeepSpeed's converter before 0.19 left it in the model file.
    """
    return name in source.stored and (source.made_for is not None or name not in source.module)


def _list_fragmented(source: UniversalContents) -> tuple[str, ...]:
    """List the frozen parameters of ZeRO-3, whose fragments DeepSpeed's converter leaves in the model files."""
    fragments = source.ranks[0].value["frozen_param_fragments"] if source.ranks else ()
    return tuple(name for name in source.frozen if name in fragments)


def _make_atoms(source: UniversalContents, name: str) -> Atoms:
    """Return a buffer as atoms; DeepSpeed's converter leaves buffers in the model file at ZeRO-3 and before 0.19."""
    tensor = source.module[name]
    path = Path(source.model.path).name
    return Atoms(states={MASTER: Atom(file=source.model, path=path, tensor=tensor, hints={})}, step=None)


def _find_unknown_folders(source: UniversalContents) -> list[str]:
    """Return a problem for each folder whose parameter the model files do not know; it is of another save."""
    known = {*source.shapes, *source.others, *source.aliases}
    names = sorted(item.name for item in (source.folder / ZERO).iterdir() if item.is_dir())
    return [f"{ZERO}/{name} belongs to no parameter that the model files know" for name in names if name not in known]


class _AtomRows(Rows):
    """Collects the tensors, the rows of the shard table and the files of a universal checkpoint."""

    def __init__(self, source: UniversalContents) -> None:
        super().__init__()
        self.files: dict[str, PtFile] = {}
        self._numbers: dict[str, int] = {}
        self._source = source

    def add(self, name: str, atoms: Atoms, problems: list[str]) -> Param | None:
        """Add all states of a parameter; append what is wrong with them to `problems`."""
        try:
            param = build_param(self._source, name, atoms.states[MASTER])
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

    def add_fragments(self, name: str) -> Param:
        """Add a frozen parameter of ZeRO-3, of which each data-parallel rank's model file has a fragment."""
        ranks = self._source.ranks
        for file in ranks:
            path = Path(file.path).name
            self._numbers.setdefault(path, len(self._numbers))
            self.files.setdefault(path, file)
        shape = tuple(self._source.model.value["frozen_param_shapes"][name])
        (slot,), length = flat.zero3_slots([math.prod(shape)], len(ranks))
        fragments = [(file, file.value.get("frozen_param_fragments") or {}) for file in ranks]
        numbers = {file.path: self._numbers[Path(file.path).name] for file in ranks}
        dtype, ranges = locate_tensor(fragments, name, numbers, length=length, what=f"frozen parameter {name}")
        param = Param(name=name, shape=shape, rule=WHOLE)
        self.add_slots("weight", param, Place(1, 0, 0, 0, 0), ranges, dtype=dtype, offset=0, size=slot.size)
        return param

    def _add_atom(self, state: str, param: Param, atom: Atom) -> None:
        strides = check_shape(param, atom)
        number = self._numbers.setdefault(atom.path, len(self._numbers))
        self.files.setdefault(atom.path, atom.file)
        place = Place(1, 0, 0, number, atom.tensor.file_offset)
        self.add_shard(state, param, place, dtype=atom.tensor.dtype, strides=strides)


def _make_source_file(path: str, file: PtFile) -> SourceFile:
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
