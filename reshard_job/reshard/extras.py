"""Name the extra of the distribution that a program needs, where its packages are not installed.

Imports the standard library only; the entry points of all programs import it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_USAGE = 2
_OWN = ("elastic_operator", "elastic_trainer", "reshard")


@contextlib.contextmanager
def extra_needed(program: str, extra: str) -> Iterator[None]:
    """End the process with one sentence and exit code 2 if an import in the block finds no such package.

    Args:
        program: name of the program.
        extra: the extra that brings all its packages along.

    Raises:
        SystemExit: a package of others is not installed.
        ModuleNotFoundError: a module of this distribution is missing, which no extra mends.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _OWN:
            raise
        sys.stderr.write(
            f"{program}: expected the packages of the extra [{extra}], found no {package}: install"
            f" 'elastic-training-operator[{extra}]', in a checkout with pip install '.[{extra}]'\n"
        )
        raise SystemExit(_USAGE) from None
