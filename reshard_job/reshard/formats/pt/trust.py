"""Decide which globals pickles may name: those of the allow list, and those that the user adds.

The user adds names for a `with` block (`trusting`), for all files that are read or written in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from reshard.errors import UnsafePickleError, UsageError
from reshard.formats.pt.known_globals import KNOWN, is_permitted
from reshard.formats.pt.objects import WITH_ATTRIBUTES, Global, Inert, StatefulDict, Tensor

_GUARDED = frozenset(
    (
        *sys.stdlib_module_names,
        *IMPORT_MAPPING,  # names of Python 2, which a loader of protocol 2 replaces
        *["annotationlib", "distutils", "imp", "lib2to3", "mailcap", "pipes"],  # of other versions of Python
        *["cloudpickle", "dill", "joblib", "numpy", "pip", "pkg_resources", "setuptools", "six", "torch"],
    )
)
"""Packages with functions that load or run what the file says: of these, only classes in `_DATA` can be allowed."""

_DATA = re.compile(
    r"(collections|datetime|decimal|enum|fractions|ipaddress|pathlib|random|uuid|zoneinfo"
    r"|torch\.(amp|cuda\.amp|nn|optim|distributed\.fsdp))(\.\w+)*\.[A-Z]\w*|logging\.getLogger",
    re.ASCII,
)
_REACHED = frozenset(("builtins", "importlib", "os", "pickle", "six", "subprocess", "sys"))
"""Modules that other modules hold as attributes: `six.moves.builtins`."""

_ATTACK = re.compile(
    r"(os|posix|nt)\.(system|popen|startfile|(exec|fork|posix_spawn|spawn)\w*)|pty\.spawn|runpy\.\w+"
    r"|(builtins|__builtin__)\.(eval|exec|execfile|compile|__import__)|(subprocess|commands)\.([a-z]\w*|Popen)"
)
"""Names that run code or commands, which no training has a reason to save."""

_GETATTR = (Global("builtins", "getattr"), Global("__builtin__", "getattr"))
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_MAX_LISTED = 20
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_TENSOR_HINT = (
    "tensors of a class of their own, such as quantized states of an optimizer, are not converted: load the checkpoint"
    " in the topology that it was saved in, or train with states in plain tensors"
)
_MAX_SEARCHED = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True)
class _Trust:
    """Names that the user accepts, and how refusals are reported.

    Attributes:
        names: `module.name` of globals in addition to the allow list.
        findings: list to which refusals are added instead of being raised; None to raise them.
    """

    names: frozenset[str] = frozenset()
    findings: list[UnsafePickleError] | None = None


_CURRENT: ContextVar[_Trust | None] = ContextVar("trust", default=None)


def _current() -> _Trust:
    return _CURRENT.get() or _Trust()


@contextlib.contextmanager
def trusting(names: Iterable[str], findings: list[UnsafePickleError] | None = None) -> Iterator[None]:
    """Accept more globals in a `with` block.

    Args:
        names: `module.name` of each.
        findings: list to which the error of each file that names other globals is added, while the objects of these
            globals stay inert data; None to raise the error.

    Raises:
        UsageError: a name is not of this form, or can never be allowed.

    >>> from reshard.api import index_of
    >>> from pathlib import Path
    >>> with trusting(["my_project.config.Schedule"]):
    ...     index = index_of(Path("ckpt/global_step2"))
    >>> index.step
    2
    """
    outer = _current()
    trust = _Trust(outer.names | check_names(names), outer.findings if findings is None else findings)
    token = _CURRENT.set(trust)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_names(names: Iterable[str]) -> frozenset[str]:
    """Check that a user may allow these names, and return them.

    Raises:
        UsageError: one is not `module.name` of a global, or is that of a global that runs code which the file chooses.
    """
    checked = frozenset(names)
    for name in sorted(checked):
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"--allow-global {name!a:.200}: expected the full name of one global, as my_package.state.Progress",
                hint="reshard inspect lists the names that a checkpoint holds and that are refused",
            )
        if _is_dangerous(found := Global(*name.rsplit(".", 1))):
            raise UsageError(
                f"--allow-global {name:.200}: can run what the file says, and is never allowed", hint=_hint([found])
            )
    return checked


def is_accepted(name: Global) -> bool:
    """Return True if a pickle may name exactly this global; its attributes are other globals."""
    return name in KNOWN or ("." not in name.name and str(name) in _current().names)


def refuse_globals(refused: Iterable[Global], made: Collection[Inert], value: Any, path: str) -> None:
    """Refuse a pickle with globals that are not accepted, or with accepted ones that it uses in an unknown way.

    Args:
        refused: globals that are not accepted.
        made: recipes of all objects of classes that are not built in.
        value: object of the pickle, in which the globals are located for the message; None if it is not known.
        path: file to name in the error.

    Raises:
        UnsafePickleError: lists the globals; added to `findings` instead, if `trusting` was given such a list.
    """
    trusted = _current().names
    misused = dict.fromkeys(
        item.target
        for item in made
        if not _is_permitted(item) and item.target in KNOWN and str(item.target) not in trusted
    )
    names = [*dict.fromkeys(refused), *misused]
    if not names:
        return
    places = _find_places(value, frozenset(names[:_MAX_LISTED]))
    problems = [
        f"{_to_printable(name)}{places.get(name, '')}"
        f"{': with arguments or a state that nobody writes' * (name in misused)}"
        for name in names[:_MAX_LISTED]
    ]
    problems += [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    are_tensors = _list_tensor_classes(made) >= set(names)
    error = UnsafePickleError(
        f"its pickle names {_to_printable(names[0])}{more}: expected only"
        " what DeepSpeed, torch, Megatron and numpy write, and plain Python data",
        path=path,
        problems=problems,
        hint=_TENSOR_HINT if are_tensors else _hint(names),
    )
    can_allow = not are_tensors and _can_allow(names)
    error.to_allow = tuple(sorted({*trusted, *map(str, names)})) if can_allow else ()
    findings = _current().findings
    if findings is None:
        raise error
    if str(error) not in map(str, findings):  # some files are read twice
        findings.append(error)


def _list_tensor_classes(made: Iterable[Inert]) -> set[Any]:
    """Return the classes of tensors that consist of other tensors, which no list of names lets this program read."""
    calls = [item.args for item in made if item.target == WITH_ATTRIBUTES and len(item.args) == 4]
    return {args[1] for args in calls if args[0] == _WRAPPER and isinstance(args[1], Global)}


def _is_permitted(made: Inert) -> bool:
    try:
        return is_permitted(made)
    except (LookupError, TypeError, ValueError, AttributeError):  # an unknown name, or arguments of unexpected types
        return False


def _is_dangerous(name: Global) -> bool:
    root, *inner = name.module.split(".")
    is_guarded = root in _GUARDED or (root.startswith("_") and not root.startswith("__"))
    is_reached = not _REACHED.isdisjoint(inner)
    return name not in KNOWN and (is_reached or (is_guarded and not _DATA.fullmatch(str(name))))


def _can_allow(names: Iterable[Global]) -> bool:
    return not any(_is_dangerous(name) or "." in name.name or not _NAME.fullmatch(str(name)) for name in names)


def _to_printable(name: str | int | Global) -> str:
    """Convert a name or key to text that can be printed on a terminal."""
    text = str(name)[:200]
    return text if text.isascii() and text.isprintable() else ascii(text)


def _hint(names: list[Global]) -> str:
    if any(_ATTACK.fullmatch(str(name)) for name in names):
        return "do not load this file with anything: it was made to run code"
    if never := [_to_printable(name) for name in names if _is_dangerous(name) and name not in _GETATTR]:
        return f"{never[0]} can run code and is never allowed: convert the object to plain data before it is saved"
    if not _can_allow(names):
        return (
            "save the checkpoint again without methods, and without objects of classes that are defined inside of"
            " others, or whose names are not ASCII"
        )
    some = " ".join(f"--allow-global {_to_printable(name)}" for name in names[:3])
    return (
        "who loads the result runs what it names: if you know who wrote the checkpoint, and what these do, add"
        f" {some}{' ...' if len(names) > 3 else ''}; else save it again without such objects"
    )


def _find_places(root: Any, names: frozenset[Global]) -> Mapping[Global, str]:
    """Find the first place of each name, as keys and positions that lead to it; search only a part of large trees."""
    places: dict[Global, str] = {}
    seen: set[int] = set()
    todo: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while todo and len(places) < len(names) and len(seen) < _MAX_SEARCHED:
        value, path = todo.pop()
        name = value.target if isinstance(value, Inert) else value
        if isinstance(name, Global) and name in names and name not in places and path:
            places[name] = f" at {'.'.join(path)[:200]}"
        if id(value) in seen:
            continue
        seen.add(id(value))
        todo += [(part, (*path, key)) for key, part in reversed(_list_children(value))]
    return places


def _list_children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        parts = [
            (_to_printable(key)[:60] if isinstance(key, str | int) else "(key)", item) for key, item in value.items()
        ]
        parts += [("(key)", key) for key in value if isinstance(key, Global | Inert)]
        return [*parts, ("(state)", value.state)] if isinstance(value, StatefulDict) else parts
    if isinstance(value, Inert):
        numbered = [(str(at), item) for items in (value.args, value.items) for at, item in enumerate(items)]
        keyed = [
            (_to_printable(key)[:60] if isinstance(key, str | int) else "(key)", item) for key, item in value.pairs
        ]
        return [*numbered, ("(state)", value.state), *keyed]
    if isinstance(value, Tensor):
        return [] if value.attributes is None else [("(class)", value.attributes[0]), ("(state)", value.attributes[1])]
    return [(str(at), part) for at, part in enumerate(value)] if isinstance(value, list | tuple) else []
