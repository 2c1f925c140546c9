"""Read the optimizer's parameter groups of a universal checkpoint: the states that parameters share, and settings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from reshard.formats.deepspeed.reading.groups import to_plain
from reshard.formats.deepspeed.scalars import identify_scalar
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile
from reshard.formats.universal.atoms import Atoms
from reshard.formats.universal.names import MASTER, STEP, atom_file
from reshard.formats.universal.source import UniversalContents
from reshard.tensors.layout import ParamGroup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """Types and scalars that all parameters of a group have in common.

    Attributes:
        dtypes: state that is a tensor -> its type; `fp32` comes first.
        scalars: state that is one number -> its value as saved, and the file that holds its bytes.
    """

    dtypes: Mapping[str, str]
    scalars: Mapping[str, tuple[Any, PtFile]]


def read_group_state(
    source: UniversalContents, number: int, atoms: Mapping[str, Atoms], problems: list[str]
) -> GroupState:
    """Collect the states that the parameters of a group share; add each file that a parameter lacks to `problems`."""
    names = [name for name in source.groups[number] if name in atoms]
    dtypes: dict[str, str] = {}
    for name in names:
        for state, atom in sorted(atoms[name].states.items(), key=lambda item: item[0] != MASTER):
            dtypes.setdefault(state, atom.tensor.dtype)
    for name in names:
        problems += [f"{atom_file(name, state)} is missing" for state in dtypes if state not in atoms[name].states]
    scalars = _read_scalars(source, number, {name: atoms[name] for name in names}, problems)
    return GroupState(dtypes=dtypes, scalars=scalars)


def _read_scalars(
    source: UniversalContents, number: int, atoms: Mapping[str, Atoms], problems: list[str]
) -> dict[str, tuple[Any, PtFile]]:
    """Read `step` of a group from its atoms; a checkpoint of ZeRO-3 has it in the optimizer file instead."""
    steps = {name: param_atoms.step for name, param_atoms in atoms.items()}
    known_steps = {name: step for name, step in steps.items() if step is not None}
    if not known_steps:
        return _read_optimizer_scalars(source, number)
    problems += [f"{atom_file(name, STEP)} is missing" for name in steps if name not in known_steps]
    values = {name: identify_scalar(value, file.path) for name, (value, file) in known_steps.items()}
    usual, count = Counter(values.values()).most_common(1)[0]
    problems += [
        f"{atom_file(name, STEP)} is of another step than that of {count} others of group {number}"
        for name, value in values.items()
        if value != usual
    ]
    return {STEP: next(step for name, step in known_steps.items() if values[name] == usual)}


def _read_optimizer_scalars(source: UniversalContents, number: int) -> dict[str, tuple[Any, PtFile]]:
    inner = source.optimizer.value.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, Mapping) else None
    group_states = states.get(source.first_states[number]) if isinstance(states, Mapping) else None
    return {
        str(key): (value, source.optimizer)
        for key, value in (group_states.items() if isinstance(group_states, Mapping) else ())
        if not isinstance(value, Tensor) or not value.shape
    }


def read_param_groups(source: UniversalContents, states: tuple[GroupState, ...]) -> tuple[ParamGroup, ...]:
    """Convert the optimizer's `param_groups` to the form that all formats share."""
    groups = []
    for names, settings, state in zip(source.groups, source.settings, states, strict=True):
        options = to_plain({key: value for key, value in settings.items() if key != "params"}, source.optimizer)
        scalars: dict[str, int | float] = {}
        for key, (value, file) in state.scalars.items():
            number = to_plain({key: value}, file)
            assert isinstance(number, Mapping)
            if isinstance(numeric := number.get(key), int | float):
                scalars[key] = numeric
        assert isinstance(options, Mapping)
        groups.append(ParamGroup(names=names, options=options, scalars=scalars))
    return tuple(groups)
