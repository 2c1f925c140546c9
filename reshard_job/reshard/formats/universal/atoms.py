"""One parameter's folder: a file per state, and its `step`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError
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
        file: its file.
        path: relative to the checkpoint's folder.
        tensor: the whole tensor.
        hints: what else the file says; None for the bare, flat tensors of ZeRO-3.
    """

    file: PtFile
    path: str
    tensor: Tensor
    hints: Hints | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """All of a parameter's folder.

    Attributes:
        states: state -> atom.
        step: content of `step.pt` and its file; None where there is none.
    """

    states: Mapping[str, Atom]
    step: tuple[Any, PtFile] | None


def read_atoms(folder: Path, name: str) -> Atoms:
    """Read the metadata of a parameter's files.

    Raises:
        CorruptSourceError: with everything that is missing or damaged.
        UnsupportedError, UnsafePickleError: see `reshard.formats.base`.
    """
    place = folder / ZERO / name
    linked = place.is_symlink()
    found = sorted(item.name for item in place.iterdir()) if place.is_dir() and not linked else []
    states: dict[str, Atom] = {}
    step: tuple[Any, PtFile] | None = None
    problems: list[str] = [f"{ZERO}/{name} is a symbolic link: expected a folder of the checkpoint's own"] * linked
    for state in (known for file_name in found if (known := state_of(file_name)) is not None):
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
        raise CorruptSourceError(f"the atoms of {name} cannot be used", path=str(place), problems=problems)
    return Atoms(states=states, step=step)


def param_of(source: UniversalContents, name: str, atom: Atom) -> Param:
    """The parameter with its whole shape, compared with what the model files say of its shards.

    Raises:
        CorruptSourceError: the tensor is not of the shape or the size that it was saved with.
    """
    shards = source.shapes[name]
    hints: Hints = atom.hints or {}
    shape = atom.tensor.shape
    sizes = {math.prod(shards[0]), sum(math.prod(shard) for shard in shards)}
    vocabulary = source.vocabulary_rows(name)
    if hints.get(IS_EXPERT):  # the model file has the experts of one rank only
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
    """Strides in elements, `[ndim]`, of a state whose parameter is known.

    Raises:
        CorruptSourceError: it is of another shape.
    """
    if atom.tensor.shape == param.shape:
        return atom.tensor.stride
    if atom.tensor.num_elements != math.prod(param.shape) or not atom.tensor.is_contiguous:
        raise CorruptSourceError(
            f"has the shape {list(atom.tensor.shape)}, expected {list(param.shape)}", path=atom.path
        )
    return strides_of(param.shape)
