"""Compare a source with a model description, and with the optimizer that shall go on from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.described.description import ModelDescription, Shape
from reshard.formats.deepspeed.described.optimizer import Optimizer
from reshard.tensors.cast import FLOATS
from reshard.tensors.layout import PADDING, Index, ParamGroup

_WEIGHTS = ("fp32", "weight")
_MOST_PROBLEMS = 20
_WRITTEN_BY_SCHEDULE = ("lr", "initial_lr")


def has_weights_alone(index: Index) -> bool:
    """Return whether a source holds nothing of an optimizer, or its states were not selected."""
    is_left_out = not index.groups or bool(index.left_out)
    return is_left_out and all(tensor.key.state in _WEIGHTS for tensor in index.tensors)


def refuse_other_model(index: Index, description: ModelDescription) -> None:
    """Refuse a description of another model than the source's.

    Raises:
        UnsupportedError: the message lists every misfit.
    """
    shapes = {
        tensor.key.name: tensor.shape
        for state in _WEIGHTS
        for tensor in index.tensors
        if tensor.key.state == state and not tensor.key.name.endswith(PADDING)
    }
    shapes |= {alias: shapes[name] for alias, name in index.aliases.items() if name in shapes and alias not in shapes}
    expected: dict[str, Shape] = {**description.params, **description.buffers}
    problems = list(_find_misfits(shapes, expected, description.shared))
    problems += [
        f"{tensor.key.name} is described as a parameter, and is {tensor.dtype} in the source"
        for tensor in index.tensors
        if tensor.key.state in _WEIGHTS and tensor.key.name in description.params and tensor.dtype not in FLOATS
    ]
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise UnsupportedError(
            f"does not hold the weights that {description.path} describes",
            path=str(index.root),
            problems=[*problems[:_MOST_PROBLEMS], *more],
            hint="give --names FILE where only names differ, or describe the model of the run that saved the source",
        )


def _find_misfits(
    shapes: Mapping[str, Shape], expected: Mapping[str, Shape], shared: Mapping[str, str]
) -> Iterator[str]:
    second: dict[str, list[str]] = {}
    for alias, name in shared.items():
        second.setdefault(name, []).append(alias)
    for name, shape in expected.items():
        saved = next((shapes[one] for one in (name, *second.get(name, ())) if one in shapes), None)
        if saved is None:
            yield f"{name} {list(shape)} is not in the source"
        elif saved != shape:
            yield f"{name} is {list(saved)} in the source, and {list(shape)} in the description"
    yield from (f"{name} is not described" for name in sorted(shapes.keys() - expected.keys() - shared.keys()))


def refuse_other_optimizer(index: Index, optimizer: Optimizer) -> None:
    """Refuse a source whose optimizer cannot go on as the one of the run to come.

    Raises:
        UnsupportedError: it keeps other states, computes otherwise, or its step is not known.
    """
    where = str(index.root)
    if index.unread is not None:
        raise index.unread
    states = sorted({tensor.key.state for tensor in index.tensors}.difference(_WEIGHTS))
    if states != sorted(optimizer.tensors):
        raise UnsupportedError(
            f"its optimizer has the states {', '.join(states) or 'none'}, and {optimizer.name} keeps"
            f" {', '.join(optimizer.tensors) or 'none'}",
            path=where,
            hint="configure the optimizer of the run that saved the source; or take the weights alone with"
            " --states weight, and start the optimizer anew",
        )
    for group in index.groups:
        _refuse_other_decay(group, optimizer, where)
    counts = [group.scalars.get("step") for group in index.groups]
    if "step" in optimizer.order and not index.step and not any(counts):
        raise UnsupportedError(
            f"does not say how many steps its optimizer has done, which {optimizer.name} corrects its moments by",
            path=where,
            hint="save the optimizer's whole state, or take the weights alone with --states weight",
        )


def refuse_lost_masters(index: Index) -> None:
    """Refuse to go on in fp32 at ZeRO stage 0, which keeps no master weights, from weights that are rounded.

    Raises:
        UnsupportedError: the source has master weights besides, which would be lost.
    """
    masters = {tensor.key.name for tensor in index.tensors if tensor.key.state == "fp32"}
    rounded = [
        tensor.key.name
        for tensor in index.tensors
        if tensor.key.state == "weight" and tensor.key.name in masters and tensor.dtype != "float32"
    ]
    if rounded:
        raise UnsupportedError(
            f"holds master weights beside rounded ones, such as {rounded[0]}, and a run in fp32 at ZeRO stage 0 keeps"
            " only one of both",
            path=str(index.root),
            hint="choose stage 1, 2 or 3, or train in bf16",
        )


def _refuse_other_decay(group: ParamGroup, optimizer: Optimizer, where: str) -> None:
    own = group.options.get("decoupled_weight_decay")
    for settings in optimizer.settings:
        other = settings.get("decoupled_weight_decay")
        decays = bool(group.options.get("weight_decay"))
        if decays and isinstance(own, bool) and isinstance(other, bool) and own is not other:
            kinds = {True: "AdamW", False: "Adam"}
            raise UnsupportedError(
                f"was trained with the weight decay of {kinds[own]}, and {optimizer.name} decays like {kinds[other]}",
                path=where,
                hint="configure the optimizer of the run that saved the source",
            )


def list_differences(index: Index, description: ModelDescription, optimizer: Optimizer) -> Iterator[str]:
    """Yield a note for each setting that the source has otherwise than the run to come: the source's is written."""
    for at, (group, settings) in enumerate(zip(description.groups, optimizer.settings, strict=True)):
        own = next((other for other in index.groups if set(other.names) & set(group.names)), None)
        for key, value in settings.items() if own is not None else ():
            if key in _WRITTEN_BY_SCHEDULE or own is None or key not in own.options:
                continue
            if isinstance(value, int | float | tuple) and _to_plain(own.options[key]) != _to_plain(value):
                yield (
                    f"group {at}: {key} is {own.options[key]!r:.40} in the source and {value!r:.40} in the run to come:"
                    " the source's is written, and DeepSpeed takes it"
                )


def _to_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value
