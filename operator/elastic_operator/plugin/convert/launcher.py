"""Removes the options of torchrun that the operator sets for every attempt from the command of a container."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import shlex
from collections.abc import Sequence

from elastic_operator.plugin.convert.section import ConvertError

_SET_BY_THE_OPERATOR = {
    "nnodes", "nproc", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr", "max-restarts",
    "rdzv-backend", "rdzv-conf", "rdzv-endpoint", "rdzv-id",
}  # fmt: skip
"""Options with a value that the operator sets by PET_* variables; an option on the command line would win. `nproc` is
that of elastic_trainer.launch.
"""

_KEPT = {
    "duplicate-stderr-filters", "duplicate-stdout-filters", "event-log-handler", "local-ranks-filter", "log-dir",
    "log-line-prefix-template", "logs-specs", "monitor-interval", "numa-binding", "preload", "r", "redirects", "role",
    "shutdown-timeout", "signals-to-handle", "start-method", "t", "tee",
}  # fmt: skip
"""Options with a value that stay; `preload` is that of elastic_trainer.launch."""

_KEPT_FLAGS = {"m", "module", "no-python", "run-path", "use-env", "virtual-local-rank"}
_FLAGS_OF_THE_OPERATOR = {"standalone"}

_MODULES = ("torch.distributed.run", "torch.distributed.launch", "elastic_trainer.launch")
_PYTHON_FLAGS = re.compile(r"-(?!m|X|W)\w+|-[XW].+")
"""Options of Python before `-m` that have no value in a word of their own; -X and -W may have one."""

_OPERATORS = _SET_BY_THE_OPERATOR | _FLAGS_OF_THE_OPERATOR
_WITH_VALUE = _SET_BY_THE_OPERATOR | _KEPT
_KNOWN = _WITH_VALUE | _KEPT_FLAGS | _FLAGS_OF_THE_OPERATOR
_IN_TEXT = re.compile(rf"(?<![\w-])--?(?:{'|'.join(sorted(_OPERATORS)).replace('-', '[-_]')})(?![\w-])")
_STARTS_RANKS = re.compile(rf"\btorchrun\b|{'|'.join(map(re.escape, _MODULES))}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command and arguments of a container.

    Attributes:
        starts_ranks: it starts torchrun or elastic_trainer.launch, as far as can be seen.
        removed: options that were removed.
        processes: processes in each pod that an option asked for, None if none did.
    """

    command: tuple[str, ...]
    args: tuple[str, ...]
    starts_ranks: bool = False
    removed: tuple[str, ...] = ()
    processes: int | None = None


def remove_launch_options(command: Sequence[str], args: Sequence[str], path: str) -> Command:
    """Return the command without the options that the operator sets.

    Args:
        command: of the container.
        args: of the container.
        path: of the container, for errors.

    Raises:
        ConvertError: a shell or another program has the options, or an option is unknown, so that nobody can tell its
            value from the script of the training.

    >>> remove_launch_options(["torchrun", "--nnodes=4", "train.py"], [], "").command
    ('torchrun', 'train.py')
    """
    tokens = [*command, *args]
    start = _find_options(tokens)
    if start is None:
        return _check_text(command, args, path)
    removed: list[str] = []
    drop: set[int] = set()
    processes = None
    index = start
    while index < len(tokens) and tokens[index].startswith("-"):
        name, has_value, value = tokens[index].partition("=")
        option = _full_name(name)
        takes_value = option in _WITH_VALUE
        if option is None:
            raise ConvertError(
                f"{path}: {name} is no option of torchrun that the converter knows: remove it, or put the command into "
                "a shell (sh -c)"
            )
        used = [index] if has_value or not takes_value else [index, index + 1]
        if option in _OPERATORS:
            drop.update(used)
            removed.append(name)
        if option in ("nproc", "nproc-per-node"):
            value = value if has_value else "".join(tokens[index + 1 : index + 2])
            if value == "cpu":
                raise ConvertError(f"{path}: {name} is cpu: trainings on CPUs are not converted")
            processes = int(value) if value.isdecimal() else None
        index = used[-1] + 1
    count = len(command)
    return Command(
        command=tuple(token for i, token in enumerate(tokens[:count]) if i not in drop),
        args=tuple(token for i, token in enumerate(tokens[count:], count) if i not in drop),
        starts_ranks=True,
        removed=tuple(removed),
        processes=processes,
    )


def _full_name(word: str) -> str | None:
    """Return the launcher's option that a word stands for, as argparse reads it; None if there is no such option."""
    name = word.lstrip("-").replace("_", "-")
    if name in _KNOWN or not word.startswith("--"):
        return name if name in _KNOWN else None
    longer = [option for option in _KNOWN if option.startswith(name)]
    return longer[0] if name and len(longer) == 1 else None


def _find_options(tokens: Sequence[str]) -> int | None:
    """Return where the options of the launcher begin; None if the command starts none."""
    if tokens and posixpath.basename(tokens[0]) == "torchrun":
        return 1
    if not tokens or not re.fullmatch(r"python[\d.]*", posixpath.basename(tokens[0])):
        return None
    index = 1
    while index < len(tokens) and (tokens[index] in ("-X", "-W") or _PYTHON_FLAGS.fullmatch(tokens[index])):
        index += 2 if tokens[index] in ("-X", "-W") else 1
    is_launcher = tokens[index : index + 1] == ["-m"] and "".join(tokens[index + 1 : index + 2]) in _MODULES
    return index + 2 if is_launcher else None


def _check_text(command: Sequence[str], args: Sequence[str], path: str) -> Command:
    """Return a command that begins with something else than a launcher, such as a shell, if it sets no option of one.

    Raises:
        ConvertError: it does.
    """
    text = "\n".join([*command, *args])
    starts_ranks = bool(_STARTS_RANKS.search(text))
    found = [*_IN_TEXT.findall(text), *_find_abbreviated(text)] if starts_ranks else []
    if found:
        raise ConvertError(
            f"{path}: a shell or another program starts torchrun with {', '.join(dict.fromkeys(found))}: remove these "
            "options, as the operator sets them for every attempt (PET_NNODES and so on), and convert again"
        )
    return Command(command=tuple(command), args=tuple(args), starts_ranks=starts_ranks)


def _find_abbreviated(text: str) -> list[str]:
    """Return the words of a shell's text between a launcher and its script that stand for options of the operator."""
    found = []
    for start in _STARTS_RANKS.finditer(text):
        rest = text[start.end() :].replace("\\\n", " ")
        try:
            words = iter(shlex.split(rest))
        except ValueError:  # quotes that end outside of the launcher's words
            words = iter(rest.split())
        for word in words:
            name, has_value, _ = word.partition("=")
            option = _full_name(name) if word.startswith("-") else None
            if option is None:
                break
            if option in _OPERATORS:
                found.append(name)
            if option in _WITH_VALUE and not has_value:
                next(words, None)
    return found
