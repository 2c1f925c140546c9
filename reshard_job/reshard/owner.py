"""`python -m reshard.owner PATH COMMAND...`: run a command as the owner of a path, if this process is root.

What a conversion writes must belong to the user that trains, or that user cannot go on in the same folder. Where nobody
says who that is, the owner of what the training wrote does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from reshard.cli.output import tell
from reshard.contract import ExitCode


def main() -> int:
    """Entry point; returns only where the command cannot be started."""
    if len(sys.argv) < 3:
        tell(["usage: python -m reshard.owner PATH COMMAND..."])
        return ExitCode.USAGE
    path, command = Path(sys.argv[1]), sys.argv[2:]
    try:
        become(path)
        os.execvp(command[0], command)
    except OSError as error:
        tell([f"reshard.owner: {command[0]!r} cannot be run as the owner of {path}: {error}"])
        return ExitCode.INTERNAL


def become(path: Path) -> None:
    """Give up root for the owner of `path`, or of its nearest parent that exists. Does nothing for others than root.

    Raises:
        OSError: the path cannot be looked at, or the kernel does not allow the change.
    """
    if os.geteuid() != 0:
        return
    while not path.exists() and path != path.parent:
        path = path.parent
    owner = path.stat()
    if owner.st_uid == 0:
        return
    os.setgroups([*os.getgroups(), owner.st_gid])
    os.setgid(owner.st_gid)
    os.setuid(owner.st_uid)


if __name__ == "__main__":
    sys.exit(main())
