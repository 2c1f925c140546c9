"""`python -m reshard.owner PATH COMMAND...`: run a command as the owner of a path, if this process is root.

The files of a conversion must belong to the user that trains, or that user cannot write to the same folder later. If no
user is configured, the owner of the files that the training wrote is used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from reshard.cli.output import write_log
from reshard.contract import ExitCode


def main() -> int:
    """Run the command of `sys.argv` as the owner of a path; return an exit code if it cannot be started."""
    if len(sys.argv) < 3:
        write_log(["usage: python -m reshard.owner PATH COMMAND..."])
        return ExitCode.USAGE
    path, command = Path(sys.argv[1]), sys.argv[2:]
    try:
        become(path)
        os.execvp(command[0], command)
    except OSError as error:
        write_log([f"reshard.owner: {command[0]!r} cannot be run as the owner of {path}: {error}"])
        return ExitCode.INTERNAL


def become(path: Path) -> None:
    """Change this process' user from root to the owner of `path`, or of its nearest existing parent.

    Nothing is changed if this process is not root.

    Raises:
        OSError: the path's owner cannot be read, or the kernel does not allow the change.
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
