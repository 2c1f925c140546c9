"""Apply a name map as a stranger would: which elements of which tensors of the source a tensor of the target has.

The file is described in docs/name-maps.md. The command has accepted it already.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.storage.yaml_file import read_yaml
from reshard.witness.table import PADDING, Ints, Key, Tensor

_BRACES = re.compile(r"\{([^{}]*)\}")
_FIELD = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::\s*(.+)|([+-].*))?")
_KINDS = {"int": r"0|[1-9]\d*", "word": r"[^.]+", "any": r".+"}
Index = Ints
"""Indices of elements, [elements, ndim]."""


class Part(NamedTuple):
    """Some elements of a tensor of the target, and where they are in a tensor of the source."""

    which: Ints
    tensor: Tensor
    element: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Source of a tensor of the target: one or several tensors of the source checkpoint.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        tensors: tensors of the source; the first one decides about copies.
        split: returns the parts of some elements, which are numbered in row-major order.
    """

    shape: tuple[int, ...]
    dtype: str
    tensors: Sequence[Tensor]
    split: Callable[[Ints], Iterator[Part]]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_average(self) -> bool:
        """Return True if the tensor is the mean of its copies."""
        return self.num_averaged > 0

    @property
    def num_averaged(self) -> int:
        """Return over how many copies, from the first on, the tensor is a mean; 0 if it is none."""
        numbers = {tensor.num_averaged for tensor in self.tensors}
        return numbers.pop() if len(numbers) == 1 else 0

    @property
    def num_copies(self) -> int:
        """Return how many copies there are; the tensors of a part that was fused or cut count as one copy."""
        return len(self.tensors[0].copies) if len(self.tensors) == 1 else max(1, self.num_averaged)

    @property
    def is_rank_local(self) -> bool:
        """Return True if the framework lets the copies differ."""
        return any(tensor.is_rank_local for tensor in self.tensors)

    def find(self, copy: int, element: Ints) -> tuple[Ints, Ints]:
        """Return file number and byte of elements, see `Tensor.find`."""
        files, positions = np.full(len(element), -1), np.full(len(element), -1)
        for part in self.split(element):
            files[part.which], positions[part.which] = part.tensor.find(copy, part.element)
        return files, positions


def same(tensor: Tensor) -> Origin:
    """Return the origin of a tensor that is as it was."""

    def split(element: Ints) -> Iterator[Part]:
        yield Part(np.arange(len(element)), tensor, element)

    return Origin(tensor.shape, tensor.dtype, (tensor,), split)


class Template(NamedTuple):
    """A name with fields: texts, and (field, kind, number to add)."""

    parts: tuple[str | tuple[str, str, int], ...]

    def match(self, name: str, kinds: Mapping[str, str]) -> dict[str, str | int] | None:
        """Return the value of each field, or None if the name does not fit."""
        fields = [part for part in self.parts if not isinstance(part, str)]
        pattern = "".join(
            re.escape(part) if isinstance(part, str) else f"({_pattern(kinds[part[0]])})" for part in self.parts
        )
        found = re.fullmatch(pattern, name)
        if found is None:
            return None
        values: dict[str, str | int] = {}
        for (field, _, add), text in zip(fields, found.groups(), strict=True):
            value = int(text) - add if kinds[field] == "int" else text
            if values.setdefault(field, value) != value:
                return None
        return values

    def render(self, values: Mapping[str, str | int]) -> str:
        """Return the name for these values."""
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(part)
            else:
                value = values[part[0]]
                texts.append(str(value + part[2]) if isinstance(value, int) else value)
        return "".join(texts)


def _pattern(kind: str) -> str:
    return _KINDS.get(kind) or "|".join(map(re.escape, kind.split("|")))


class _Rule(NamedTuple):
    sources: tuple[Template, ...]
    targets: tuple[Template, ...]
    kinds: Mapping[str, str]
    dim: int
    groups: int
    sizes: tuple[int, ...] | None
    is_stacked: bool
    joins: bool


class NameMap:
    """A name map.

    Args:
        path: file of the map; None for one that keeps all names.
    """

    def __init__(self, path: Path | None) -> None:
        content: Mapping[str, Any] = {} if path is None else read_yaml(path)
        self.is_identity = path is None
        known: dict[str, int] = {}
        for name, text in (content.get("constants") or {}).items():
            known[name] = _evaluate(text, known)
        self._rules = [_rule(entry, known) for entry in content.get("rules") or ()]
        self._rules += [_rule({"from": entry, "to": []}, known) for entry in content.get("drop") or ()]
        self._tied = {_text(second, known): _text(name, known) for second, name in (content.get("tied") or {}).items()}
        self._untied = {_text(second, known) for second in content.get("untied") or {}}

    def apply(
        self, source: Mapping[Key, Tensor], aliases: Mapping[str, str]
    ) -> tuple[dict[Key, Origin], dict[str, str]]:
        """Return what each tensor after the map is made of, and second names after the map."""
        if self.is_identity:
            return {key: same(tensor) for key, tensor in source.items()}, dict(aliases)
        origins: dict[Key, Origin] = {}
        renamed: dict[str, str] = {}
        for key in source:
            name, mark, rest = key.name.partition("#")
            for rule, values, at in self._matches(name):
                targets = [template.render(values) for template in rule.targets]
                if len(rule.sources) == len(targets) == 1 and not rule.is_stacked:
                    renamed[name] = targets[0]
                    origins[Key(key.state, targets[0] + mark + rest)] = same(source[key])
                elif rule.joins and not at:
                    keys = [Key(key.state, template.render(values)) for template in rule.sources]
                    origins[Key(key.state, targets[0])] = _join(rule, [source[each] for each in keys])
                elif not rule.joins:
                    for part, target in enumerate(targets):
                        origins[Key(key.state, target)] = _cut(rule, source[key], part, len(targets))
        seconds = {}
        for second, first in aliases.items():
            if second not in self._untied and first in renamed:
                new = [rule.targets[0].render(values) for rule, values, _ in self._matches(second) if rule.targets]
                seconds.update(dict.fromkeys(new, renamed[first]))
        return origins, {**seconds, **self._tied}

    def _matches(self, name: str) -> Iterator[tuple[_Rule, dict[str, str | int], int]]:
        for rule in self._rules:
            for at, template in enumerate(rule.sources):
                values = template.match(name, rule.kinds)
                if values is not None:
                    yield rule, values, at
                    break

    def sources_of(self, name: str) -> list[str]:
        """Return the names before the map that may belong to a name after it."""
        base = name.partition(PADDING)[0]
        if self.is_identity:
            return [base]
        return [
            source.render(values)
            for rule in self._rules
            for template in rule.targets
            if (values := template.match(base, rule.kinds)) is not None
            for source in rule.sources
        ]


def _join(rule: _Rule, parts: Sequence[Tensor]) -> Origin:
    """Return the tensor that parts, one behind the other along a dim, make up; all groups after one another."""
    first = parts[0]
    dim = rule.dim
    shapes = [(*part.shape[:dim], 1, *part.shape[dim:]) if rule.is_stacked else part.shape for part in parts]
    sizes = [shape[dim] // rule.groups for shape in shapes]
    shape = (*shapes[0][:dim], sum(sizes) * rule.groups, *shapes[0][dim + 1 :])
    starts = np.array([0, *itertools.accumulate(sizes)])

    def split(element: Ints) -> Iterator[Part]:
        index = np.array(np.unravel_index(element, shape))
        group, inside = np.divmod(index[dim], starts[-1])
        number = np.searchsorted(starts, inside, side="right") - 1
        for at in np.flatnonzero(np.bincount(number)).tolist():
            which = np.flatnonzero(number == at)
            own = index[:, which]
            own[dim] = group[which] * sizes[at] + inside[which] - starts[at]
            yield Part(which, parts[at], np.ravel_multi_index(tuple(own), shapes[at]))

    return Origin(shape, first.dtype, tuple(parts), split)


def _cut(rule: _Rule, whole: Tensor, part: int, count: int) -> Origin:
    """Return one of the parts that a tensor is cut into."""
    dim, full = rule.dim, whole.shape
    sizes = rule.sizes or (1 if rule.is_stacked else full[dim] // (count * rule.groups),) * count
    before, total, size = sum(sizes[:part]), sum(sizes), sizes[part]
    shape = (*full[:dim], size * rule.groups, *full[dim + 1 :])

    def split(element: Ints) -> Iterator[Part]:
        index = np.array(np.unravel_index(element, shape))
        group, inside = np.divmod(index[dim], size)
        index[dim] = group * total + before + inside
        yield Part(np.arange(len(element)), whole, np.ravel_multi_index(tuple(index), full))

    own = (*full[:dim], *full[dim + 1 :]) if rule.is_stacked else shape
    return Origin(own, whole.dtype, (whole,), split)


def _rule(entry: Mapping[str, Any], known: Mapping[str, int]) -> _Rule:
    sources, targets = (
        tuple(_template(text, known) for text in (side if isinstance(side, list) else [side]))
        for side in (entry["from"], entry["to"])
    )
    stated = [part for template in (*sources, *targets) for part in template.parts if not isinstance(part, str)]
    kinds = {field: kind for field, kind, _ in sorted(stated, key=lambda part: part[1] != "int")}
    joins = len(sources) > 1
    for field, text in (entry.get("over") or {}).items():
        numbers = range(_evaluate(text, known))
        joins = any(field in part for part in sources[0].parts)
        expanded = tuple(_bind(sources[0] if joins else targets[0], field, number) for number in numbers)
        sources, targets = (expanded, targets) if joins else (sources, expanded)
    sizes = entry.get("sizes")
    return _Rule(
        sources, targets, kinds, _evaluate(entry.get("dim", 0), known), _evaluate(entry.get("groups", 1), known),
        tuple(_evaluate(size, known) for size in sizes) if isinstance(sizes, list) else None,
        bool(entry.get("stack")), joins,
    )  # fmt: skip


def _bind(template: Template, field: str, number: int) -> Template:
    return Template(
        tuple(
            str(number + part[2]) if not isinstance(part, str) and part[0] == field else part for part in template.parts
        )
    )


def _template(text: str, known: Mapping[str, int]) -> Template:
    parts: list[str | tuple[str, str, int]] = []
    here = 0
    for braces in _BRACES.finditer(text):
        parts.append(text[here : braces.start()])
        found = _FIELD.fullmatch(braces[1])
        if found is not None and found[2] is not None:
            parts.append((found[1], found[2].strip(), 0))
        elif found is not None and found[1] not in known:
            parts.append((found[1], "int", _evaluate(f"0{found[3] or ''}", known)))
        else:
            parts.append(str(_evaluate(braces[1], known)))
        here = braces.end()
    return Template((*parts, text[here:]))


def _text(text: str, known: Mapping[str, int]) -> str:
    return _template(text, known).render({})


def _evaluate(text: Any, known: Mapping[str, int]) -> int:
    """Return the value of an expression of whole numbers and constants."""
    return _value(ast.parse(str(text).strip(), mode="eval").body, known)


def _value(node: ast.expr, known: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, known)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, known), _value(node.right, known)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
    raise ValueError("an expression of a name map that the stranger does not know")
