"""Read a pattern file, which says how tensor parallelism cuts each parameter of a checkpoint that does not say it.

The kinds are those of Universal Checkpointing (Lian et al., USENIX ATC 2025, section 5.3): `unique`, `replicate`,
`shard-v`, `shard-h`, `shard-hy`, `shard-nc`, `average`. Docs: docs/deepspeed-format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reshard.errors import UsageError
from reshard.formats.deepspeed.tensor_parallel import patterns
from reshard.formats.deepspeed.tensor_parallel.regex import PatternError, PatternSet
from reshard.storage.yaml_file import read_yaml

VERSION = 1
_KEYS = {"pattern", "kind", "dim", "parts", "view", "vocabulary"}
_VOCABULARY = {"rows", "padded_rows", "multiple"}


def load(path: str | Path) -> Mapping[str, Any]:
    """Read a pattern file and return the `universal_checkpoint_info` that it stands for.

    Raises:
        UsageError: the file is wrong; the message lists every problem.
    """
    value = read_yaml(Path(path))
    try:
        return build(value)
    except UsageError as error:
        raise UsageError(error.message, path=str(path), problems=error.problems, hint=error.hint) from error


def build(value: Any) -> Mapping[str, Any]:
    """Convert the content of a pattern file to `universal_checkpoint_info`.

    Raises:
        UsageError: the content is wrong; the message lists every problem.
    """
    if not isinstance(value, Mapping) or value.get("version") != VERSION or not isinstance(value.get("rules"), list):
        raise UsageError(f"expected a mapping with version: {VERSION} and a list of rules")
    problems = [f"unknown key {key}" for key in sorted(value.keys() - {"version", "rules", "vocabulary"}, key=str)]
    info: dict[str, Any] = {"universal_checkpoint_version": 0.2, patterns.COLUMN: []}
    problems += _read_vocabulary(info, value.get("vocabulary") or {})
    for number, rule in enumerate(value["rules"], start=1):
        problems += [f"rule {number}: {problem}" for problem in _read_rule(info, rule)]
    if problems:
        raise UsageError("is no file of patterns", problems=problems)
    return info


def _read_vocabulary(info: dict[str, Any], value: Any) -> list[str]:
    if not isinstance(value, Mapping) or value.keys() - _VOCABULARY:
        return [f"vocabulary: expected {', '.join(sorted(_VOCABULARY))}, found {value!r:.80}"]
    problems = [f"vocabulary: {key} is {size!r}, expected a number above 0" for key, size in value.items()
                if type(size) is not int or size < 1]  # fmt: skip
    if value and not {"rows", "padded_rows"} <= value.keys():
        problems.append("vocabulary: rows and padded_rows belong together")
    names = {"rows": "original_vocab_size", "padded_rows": "padded_vocab_size", "multiple": "vocab_multiple"}
    info.update({names[key]: size for key, size in value.items()})
    return problems


def _read_rule(info: dict[str, Any], rule: Any) -> list[str]:
    if not isinstance(rule, Mapping) or not isinstance(rule.get("pattern"), str):
        return [f"expected a mapping with pattern and kind, found {rule!r:.80}"]
    problems = [f"unknown key {key}" for key in sorted(rule.keys() - _KEYS, key=str)]
    try:
        PatternSet([rule["pattern"]])
    except PatternError as error:
        problems.append(str(error))
    add = _KINDS.get(rule.get("kind", ""))
    if add is None:
        return [*problems, f"kind {rule.get('kind')!r}: expected one of {', '.join(_KINDS)}"]
    pattern = f"(?:{rule['pattern']})$"  # here a pattern matches the whole name, in DeepSpeed only its start
    if rule.get("vocabulary"):
        info.setdefault("vocabulary_parameter_patterns", []).append(pattern)
    return problems + add(info, pattern, rule)


def _make_adder(key: str, *fixed: tuple[str, int]) -> Callable[[dict[str, Any], str, Mapping[str, Any]], list[str]]:
    def add(info: dict[str, Any], pattern: str, rule: Mapping[str, Any]) -> list[str]:
        info.setdefault(key, []).append(pattern)
        given = {name: rule[name] for name in ("dim", "parts", "view") if name in rule}
        return [f"{rule['kind']} takes no {name}" for name in given if (name, given[name]) not in fixed]

    return add


def _add_view(info: dict[str, Any], pattern: str, rule: Mapping[str, Any]) -> list[str]:
    """Add a rule for fused tensors or for a view with other dims: `shard-nc`, and `shard-hy` for one tensor."""
    dim, parts, view = rule.get("dim"), rule.get("parts"), rule.get("view")
    problems = []
    if type(dim) is not int or dim < 0:
        problems.append(f"{rule['kind']}: dim is {dim!r}, expected the dim that is cut")
    if view is not None and not _is_size_list(view):
        problems.append(f"view is {view!r}, expected a list of sizes")
    if not (parts is None or (type(parts) is int and parts > 0) or _is_size_list(parts)):
        problems.append(f"parts is {parts!r}, expected sizes along dim, or how many equal ones")
    if view is None and parts is None and rule["kind"] == "shard-nc":
        problems.append("shard-nc: expected parts, or a view, or both")
    if problems or type(dim) is not int:
        return problems
    if view is not None and dim >= len(view):
        return [f"dim {dim} of the view {view}"]
    if view is not None and isinstance(parts, int):
        parts = [view[dim] // parts] * parts if view[dim] % parts == 0 else [view[dim] + 1]
    if view is not None and parts is not None and sum(parts) != view[dim]:
        return [f"the parts do not add up to {view[dim]}, the view's size along dim {dim}"]
    _add_parts(info, pattern, dim, parts, view)
    return []


def _add_parts(info: dict[str, Any], pattern: str, dim: int, parts: Any, view: list[int] | None) -> None:
    if view is not None:
        shape: list[Any] = list(view)
        shape[dim] = tuple(parts) if parts is not None else (view[dim],)
    else:
        shape = [-1] * (dim + 1)
        shape[dim] = tuple(parts) if isinstance(parts, list) else parts or 1
    entry = {"patterns": [pattern], "shape": tuple(shape), "partition_dim": dim, "own_dims": view is None}
    info.setdefault("parameter_with_sub_params", []).append(entry)


def _is_size_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(size) is int and size > 0 for size in value)


_KINDS: dict[str, Callable[[dict[str, Any], str, Mapping[str, Any]], list[str]]] = {
    "unique": _make_adder("tp_replicated_parameter_patterns"),
    "replicate": _make_adder("tp_replicated_parameter_patterns"),
    "average": _make_adder(patterns.AVERAGED),
    "shard-v": _make_adder(patterns.COLUMN, ("dim", 0)),
    "shard-h": _make_adder("parameter_with_row_parallelism_patterns", ("dim", 1)),
    "shard-hy": _add_view,
    "shard-nc": _add_view,
}
