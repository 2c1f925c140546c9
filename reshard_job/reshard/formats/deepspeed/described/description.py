"""Read a model description: the facts of a model that neither tensors nor DeepSpeed's configuration say.

`elastic_trainer.stacks.description` writes the file. Format: docs/model-description.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import UsageError
from reshard.storage.yaml_file import read_content
from reshard.tensors.layout import PADDING

VERSION = 1
_KEYS = {"version", "parameters", "frozen", "buffers", "shared", "optimizer", "groups"}
_GROUP_KEYS = {"parameters", "settings"}
_LARGEST_SIZE = 1 << 48
_MOST_DIMS = 16
_MOST_PROBLEMS = 20
_LARGEST_SETTING = 1e300

Shape = tuple[int, ...]
Setting = bool | int | float | str | tuple[int | float, ...] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DescribedGroup:
    """A parameter group: names of its trained parameters in the optimizer's order, and its own settings."""

    names: tuple[str, ...]
    settings: Mapping[str, Setting]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Content of a model description.

    Attributes:
        path: the file.
        params: parameter -> shape, in the order of `model.named_parameters()`.
        frozen: parameters that are not trained.
        buffers: persistent buffer -> shape.
        shared: second name of a parameter -> its first.
        optimizer: full name of the class of the optimizer that the script passes; empty if DeepSpeed makes it.
        groups: parameter groups, in the optimizer's order.
    """

    path: Path
    params: Mapping[str, Shape]
    frozen: frozenset[str]
    buffers: Mapping[str, Shape]
    shared: Mapping[str, str]
    optimizer: str
    groups: tuple[DescribedGroup, ...]


def load(path: Path) -> ModelDescription:
    """Read a model description.

    Raises:
        UsageError: the file cannot be read, is no JSON, or does not describe a model; the message lists every problem.
    """
    try:
        value = json.loads(read_content(path), object_pairs_hook=_refuse_double_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is no JSON: {error!s:.200}", path=str(path)) from error
    if not isinstance(value, dict) or value.get("version") != VERSION or type(value["version"]) is not int:
        raise UsageError(
            f"expected a model description, a JSON object with version {VERSION}",
            path=str(path),
            hint="write it with elastic_trainer.stacks.description.write_description(model, FILE), see"
            " docs/model-description.md",
        )
    problems = list(_find_problems(value))
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise UsageError("is no model description", path=str(path), problems=[*problems[:_MOST_PROBLEMS], *more])
    return ModelDescription(
        path=path,
        params=_to_shapes(value["parameters"]),
        frozen=frozenset(value.get("frozen", ())),
        buffers=_to_shapes(value.get("buffers", {})),
        shared=dict(value.get("shared", {})),
        optimizer=value.get("optimizer", ""),
        groups=tuple(
            DescribedGroup(names=tuple(group["parameters"]), settings=_to_settings(group.get("settings", {})))
            for group in value["groups"]
        ),
    )


def _refuse_double_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {next(key for key, count in counts.items() if count > 1)!r:.80} occurs twice")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _to_shapes(value: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in value.items()}


def _to_settings(value: Mapping[str, Any]) -> dict[str, Setting]:
    return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}


def _find_problems(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a description, first with its form, and only then with what it says."""
    problems = [f"unknown key {key!r:.80}" for key in sorted(value.keys() - _KEYS)]
    problems += [f"{key} is missing" for key in ("parameters", "groups") if key not in value]
    for key in ("parameters", "buffers"):
        problems += _check_shapes(key, value.get(key, {}))
    if not _is_list_of_texts(value.get("frozen", [])):
        problems.append(f"frozen: expected a list of names, found {value['frozen']!r:.80}")
    shared = value.get("shared", {})
    if not isinstance(shared, dict) or not all(isinstance(name, str) for name in shared.values()):
        problems.append(f"shared: expected an object of names, found {shared!r:.80}")
    if not isinstance(value.get("optimizer", ""), str):
        problems.append(f"optimizer: expected the name of a class, found {value['optimizer']!r:.80}")
    groups = value.get("groups", [])
    if not isinstance(groups, list):
        problems.append(f"groups: expected a list, found {groups!r:.80}")
    else:
        problems += [text for at, group in enumerate(groups) for text in _check_group(at, group)]
    yield from problems or _find_contradictions(value)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_shapes(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{key}: expected an object of names and shapes, found {value!r:.80}"
        return
    for name, shape in value.items():
        is_shape = isinstance(shape, list) and len(shape) <= _MOST_DIMS
        if not is_shape or not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in shape):
            yield f"{key}: {name!r:.80} has the shape {shape!r:.80}, expected a list of sizes"
        if not name or name.endswith(PADDING):
            yield f"{key}: {name!r:.80} is no name"


def _check_group(at: int, group: Any) -> Iterator[str]:
    where = f"group {at}"
    if not isinstance(group, dict) or group.keys() - _GROUP_KEYS or not _is_list_of_texts(group.get("parameters")):
        yield f"{where}: expected an object with parameters, a list of names, and settings, found {group!r:.80}"
        return
    settings = group.get("settings", {})
    if not isinstance(settings, dict):
        yield f"{where}: settings: expected an object, found {settings!r:.80}"
        return
    for key, value in settings.items():
        parts = value if isinstance(value, list) else [value]
        numbers = [part for part in parts if type(part) in (int, float)]
        plain = len(numbers) == len(parts) or value is None or isinstance(value, bool | str)
        if not plain or any(abs(number) > _LARGEST_SETTING for number in numbers):
            yield f"{where}: the setting {key!r:.40} is {value!r:.80}, expected plain data"


def _find_contradictions(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions in a description of the right form."""
    params, buffers, shared = value["parameters"], value.get("buffers", {}), value.get("shared", {})
    frozen = value.get("frozen", [])
    yield from (f"{name!r:.80} is a parameter and a buffer" for name in params if name in buffers)
    yield from (f"frozen: {name!r:.80} is no parameter" for name in frozen if name not in params)
    for alias, name in shared.items():
        if name not in params:
            yield f"shared: {name!r:.80} is no parameter"
        if alias in params or alias in buffers:
            yield f"shared: {alias!r:.80} is a parameter or buffer itself"
    grouped = Counter(name for group in value["groups"] for name in group["parameters"])
    for name, count in grouped.items():
        if name not in params:
            yield f"groups: {name!r:.80} is no parameter" + (
                f", it is the second name of {shared[name]!r:.80}" if name in shared else ""
            )
        elif name in frozen:
            yield f"groups: {name!r:.80} is frozen, DeepSpeed leaves it out of its groups"
        if count > 1:
            yield f"groups: {name!r:.80} occurs {count} times"
    lost = set(frozen) | grouped.keys()
    yield from (f"groups: {name!r:.80} is trained, and in no group" for name in params if name not in lost)
    yield from (f"group {at} has no parameters" for at, group in enumerate(value["groups"]) if not group["parameters"])
    if not value["groups"]:
        yield "groups: there is none, so nothing is trained"
