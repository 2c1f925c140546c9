"""Read one parameter's folder: its atoms (a file per state) and its `step`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile, read
from reshard.formats.universal.hints import IS_EXPERT, NUM_EXPERTS, VOCABULARY, Hints, parse
from reshard.formats.universal.names import MASTER, STEP, ZERO, atom_file, state_of
from reshard.formats.universal.source import Shape, UniversalContents
from reshard.tensors.geometry import strides_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """One state of one parameter.

    Attributes:
        file: the file that holds it.
        path: of the file, relative to the checkpoint's folder.
        tensor: the whole tensor.
        hints: how tensor parallelism cuts it; None for the bare, flat tensors of ZeRO-3.
    """

    file: PtFile
    path: str
    tensor: Tensor
    hints: Hints | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """The content of a parameter's folder.

    Attributes:
        states: state -> atom.
        step: value of `step.pt` and the file itself; None without such a file.
    """

    states: Mapping[str, Atom]
    step: tuple[Any, PtFile] | None


def read_atoms(folder: Path, name: str) -> Atoms:
    """Read the metadata of a parameter's files.

    Raises:
        CorruptSourceError: with everything that is missing or damaged.
        UnsupportedError, UnsafePickleError: see `reshard.formats.base`.
    """
    atoms_folder = folder / ZERO / name
    if atoms_folder.is_symlink():
        raise UnsupportedError(
            f"{ZERO}/{name} is a symbolic link: expected a folder of the checkpoint's own",
            path=str(folder),
            hint="copy what it links to into the folder: cp -rL",
        )
    file_names = sorted(item.name for item in atoms_folder.iterdir()) if atoms_folder.is_dir() else []
    states: dict[str, Atom] = {}
    step: tuple[Any, PtFile] | None = None
    problems: list[str] = []
    for state in (known for file_name in file_names if (known := state_of(file_name)) is not None):
        path = atom_file(name, state)
        try:
            file = read(folder / path, root=folder)
            if state == STEP:
                step = file.value, file
                continue
            tensor, hints = parse(file.value, str(folder / path))
            states[state] = Atom(file=file, path=path, tensor=tensor, hints=hints)
        except CorruptSourceError as error:
            problems.append(f"{path}: {error.message}")
    if MASTER not in states and not problems:
        problems.append(f"{atom_file(name, MASTER)} is missing")
    if problems:
        raise CorruptSourceError(f"the atoms of {name} cannot be used", path=str(atoms_folder), problems=problems)
    return Atoms(states=states, step=step)


def build_param(source: UniversalContents, name: str, atom: Atom) -> Param:
    """Return the parameter with its whole shape, after a check against the shapes of its shards in the model files.

    Raises:
        CorruptSourceError: the tensor does not have the shape or the size that the model files state.
    """
    shards = source.shapes[name]
    hints: Hints = atom.hints or {}
    shape = atom.tensor.shape
    sizes = {math.prod(shards[0]), sum(math.prod(shard) for shard in shards)}
    vocabulary = source.vocabulary_rows(name)
    if hints.get(IS_EXPERT):  # the model file states only the experts of one rank
        fits = bool(shape) and shape[0] == hints.get(NUM_EXPERTS)
    elif hints.get(VOCABULARY) and vocabulary is not None:
        fits = shape[1:] == shards[0][1:] and shape[0] >= vocabulary[0]
    elif len(shards) > 1:
        fits = atom.tensor.num_elements in sizes
    else:
        fits = atom.tensor.num_elements in sizes and (shape == shards[0] or atom.tensor.is_contiguous)
        shape = shards[0]  # a flat tensor of ZeRO-3, or a view that separates fused parts
    if not fits:
        raise CorruptSourceError(
            f"has the shape {list(atom.tensor.shape)}, the model files say that it was saved in {len(shards)} shards of"
            f" {[list(shard) for shard in dict.fromkeys(shards)]}",
            path=atom.path,
        )
    rows = vocabulary[0] if vocabulary is not None and shape and shape[0] > vocabulary[0] else None
    return Param(name=name, shape=shape, rule=WHOLE, rows=rows)


def check_shape(param: Param, atom: Atom) -> Shape:
    """Return the strides of a state in elements, `[ndim]`, after a check of its shape against its parameter.

    Raises:
        CorruptSourceError: the state has another shape than the parameter.
    """
    if atom.tensor.shape == param.shape:
        return atom.tensor.stride
    if atom.tensor.num_elements != math.prod(param.shape) or not atom.tensor.is_contiguous:
        raise CorruptSourceError(
            f"has the shape {list(atom.tensor.shape)}, expected {list(param.shape)}", path=atom.path
        )
    return strides_of(param.shape)
