"""Which globals pickles may name here: those of the allow list, and those that the user of this process names.

What a user trusts holds for a `with` block: whatever is read or written in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from reshard.errors import UnsafePickleError, UsageError
from reshard.formats.pt.known_globals import KNOWN, permits
from reshard.formats.pt.objects import Global, Inert, StatefulDict, Tensor

_NEVER = frozenset(
    [
        "_pickle",
        "_posixsubprocess",
        "asyncio",
        "code",
        "codeop",
        "commands",
        "copy_reg",
        "copyreg",
        "ctypes",
        "dill",
        "cloudpickle",
        "functools",
        "gc",
        "importlib",
        "inspect",
        "marshal",
        "multiprocessing",
        "nt",
        "operator",
        "os",
        "pdb",
        "pickle",
        "pip",
        "pkgutil",
        "platform",
        "posix",
        "pty",
        "pydoc",
        "runpy",
        "shutil",
        "site",
        "socket",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "timeit",
        "urllib",
        "webbrowser",
        "zipimport",
    ]
)
"""Modules from which nobody may allow anything: their functions run whatever the file says."""

_BUILTINS = frozenset(("builtins", "__builtin__"))
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_MOST_TOLD = 20
_MOST_SEARCHED = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True)
class _Trust:
    """What is accepted.

    Attributes:
        names: `module.name` of globals besides those of the allow list.
        findings: takes what is refused, instead of that it is raised; None to raise it.
    """

    names: frozenset[str] = frozenset()
    findings: list[UnsafePickleError] | None = None


_CURRENT: ContextVar[_Trust | None] = ContextVar("trust", default=None)


def _current() -> _Trust:
    return _CURRENT.get() or _Trust()


@contextlib.contextmanager
def trusting(names: Iterable[str], findings: list[UnsafePickleError] | None = None) -> Iterator[None]:
    """Accept these globals too, in this block.

    Args:
        names: `module.name` of each.
        findings: takes an error for each file that names others, whose objects are inert data then; None to raise it.

    Raises:
        UsageError: something is no such name, or may not be allowed by anybody.
    """
    outer = _current()
    trust = _Trust(outer.names | check_names(names), outer.findings if findings is None else findings)
    token = _CURRENT.set(trust)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_names(names: Iterable[str]) -> frozenset[str]:
    """Names that a user may allow.

    Raises:
        UsageError: something is no name, or that of what runs code by itself.
    """
    found = frozenset(names)
    for name in sorted(found):
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"--allow-global {name!a:.200}: expected the full name of one global, as my_package.state.Progress",
                hint="reshard inspect lists the names that a checkpoint holds and that are refused",
            )
        if _is_dangerous(Global(*name.rsplit(".", 1))):
            raise UsageError(
                f"--allow-global {name:.200}: runs what the file says, and is never allowed",
                hint="do not load the checkpoint with anything",
            )
    return found


def is_accepted(name: Global) -> bool:
    """True if a pickle may name this global: exactly this, and no attribute of it."""
    return name in KNOWN or ("." not in name.name and str(name) in _current().names)


def judge(refused: Iterable[Global], made: Iterable[Inert], value: Any, path: str) -> None:
    """Refuse a pickle for the names that are not accepted, and for accepted ones that it uses as nobody does.

    Args:
        refused: names that are not accepted.
        made: all objects of classes that are not built in.
        value: the object of the pickle, to tell where in it they are; None where it is not known.
        path: file to name in the error.

    Raises:
        UnsafePickleError: lists them; unless somebody collects it.
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
    places = _places(value, frozenset(names[:_MOST_TOLD]))
    told = [
        f"{_told(name)}{places.get(name, '')}{': with arguments or a state that nobody writes' * (name in misused)}"
        for name in names[:_MOST_TOLD]
    ]
    told += [f"and {len(names) - _MOST_TOLD} more"] if len(names) > _MOST_TOLD else []
    error = UnsafePickleError(
        f"its pickle names {_told(names[0])}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: expected only"
        " what DeepSpeed, torch, Megatron and numpy write, and plain Python data",
        path=path,
        problems=told,
        hint=_hint(names),
    )
    findings = _current().findings
    if findings is None:
        raise error
    if str(error) not in map(str, findings):  # some files are read twice
        findings.append(error)


def _is_permitted(made: Inert) -> bool:
    try:
        return permits(made)
    except (LookupError, TypeError, ValueError, AttributeError):  # an unknown name, or arguments of unexpected types
        return False


def _is_dangerous(name: Global) -> bool:
    root = name.module.partition(".")[0]
    return root in _NEVER or (root in _BUILTINS and name not in KNOWN)


def _told(name: str | int | Global) -> str:
    """A name or key as it can be shown on a terminal."""
    text = str(name)[:200]
    return text if text.isascii() and text.isprintable() else ascii(text)


def _hint(names: list[Global]) -> str:
    if any(_is_dangerous(name) for name in names):
        return "do not load this file with anything: it was made to run code"
    if any("." in name.name for name in names):
        return "save the checkpoint again without objects of classes that are defined inside of others"
    some = " ".join(f"--allow-global {_told(name)}" for name in names[:3])
    return (
        "who loads the result runs what it names: if you know who wrote the checkpoint, and what these do, add"
        f" {some}{' ...' if len(names) > 3 else ''}; else save it again without such objects"
    )


def _places(root: Any, names: frozenset[Global]) -> Mapping[Global, str]:
    """Where each name stands first, as keys and positions that lead to it; of large trees a part is searched."""
    found: dict[Global, str] = {}
    seen: set[int] = set()
    todo: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while todo and len(found) < len(names) and len(seen) < _MOST_SEARCHED:
        value, way = todo.pop()
        name = value.target if isinstance(value, Inert) else value
        if isinstance(name, Global) and name in names and name not in found and way:
            found[name] = f" at {'.'.join(way)[:200]}"
        if id(value) in seen:
            continue
        seen.add(id(value))
        todo += [(part, (*way, key)) for key, part in reversed(_parts(value))]
    return found


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        parts = [(_told(key)[:60] if isinstance(key, str | int) else "(key)", item) for key, item in value.items()]
        parts += [("(key)", key) for key in value if isinstance(key, Global | Inert)]
        return [*parts, ("(state)", value.state)] if isinstance(value, StatefulDict) else parts
    if isinstance(value, Inert):
        numbered = [(str(at), item) for items in (value.args, value.items) for at, item in enumerate(items)]
        keyed = [(_told(key)[:60] if isinstance(key, str | int) else "(key)", item) for key, item in value.pairs]
        return [*numbered, ("(state)", value.state), *keyed]
    if isinstance(value, Tensor):
        return [] if value.attributes is None else [("(class)", value.attributes[0]), ("(state)", value.attributes[1])]
    return [(str(at), part) for at, part in enumerate(value)] if isinstance(value, list | tuple) else []
