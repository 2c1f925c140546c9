"""Start of the single file `kubectl-etj`: unpacks the program once per version and interpreter, then runs it.

Python cannot import compiled modules from an archive, so the program lies in the user's cache folder. This module is
the archive's `__main__`; it uses the standard library only, and `krew.build` fills in the lines marked so.
Its syntax is that of old versions of Python, so that they can say what is needed.
"""

import atexit
import contextlib
import os
import pathlib
import platform
import shutil
import stat
import sys
import tempfile
import time
import zipfile

BUILD = "unbuilt"  # filled in: identifies the content
SYSTEM, MACHINE = "", ""  # filled in: what the compiled modules are for
INTERPRETERS: "tuple[str, ...]" = ()  # filled in: cache tags of the interpreters for which there are compiled modules

UNUSED_SECONDS = 90 * 86_400


def main() -> None:
    """Unpack the program if this version has not been unpacked yet, and run it."""
    check_interpreter()
    archive = pathlib.Path(sys.path[0])
    folder = find_folder()
    if not (folder / "lib").is_dir():
        unpack(archive, folder)
        remove_unused(folder)
    with contextlib.suppress(OSError):
        os.utime(folder)  # the time of the last start, see remove_unused
    sys.path[0] = str(folder / "lib")
    from elastic_operator.plugin.main import main as run

    sys.exit(run())


def check_interpreter() -> None:
    """Exit with what is needed and what is here if there are no compiled modules for this interpreter."""
    found = sys.implementation.cache_tag, sys.platform, platform.machine().lower()
    if found[0] not in INTERPRETERS or found[1:] != (SYSTEM, MACHINE):
        expected = f"{' or '.join(INTERPRETERS)} on {SYSTEM} {MACHINE}"
        sys.exit(
            f"error: this kubectl-etj needs {expected}, found {' '.join(map(str, found))}: install the file for it"
        )


def find_folder() -> pathlib.Path:
    """Return the folder of this version, in the cache folder if that belongs to nobody else, else a temporary one."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kubectl-etj"
    name = f"{BUILD}-{sys.implementation.cache_tag}"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = cache.stat()
        is_private = state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_private and os.access(cache, os.W_OK):
            return cache / name
    except OSError:
        pass
    return temporary_folder() / name


def temporary_folder() -> pathlib.Path:
    """Return a folder that is removed when the program ends."""
    folder = tempfile.mkdtemp(prefix="kubectl-etj-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


def remove_unused(folder: pathlib.Path) -> None:
    """Remove the folders of other versions that were not started for three months, and of starts that were killed."""
    oldest = time.time() - UNUSED_SECONDS
    for other in folder.parent.iterdir():
        is_ours = other.name.startswith("new-") or "-cpython-" in other.name
        with contextlib.suppress(OSError):
            if is_ours and other != folder and other.stat().st_mtime < oldest:
                shutil.rmtree(other, ignore_errors=True)


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Unpack the program and the compiled modules of this interpreter, so that the folder is whole once it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="new-") as made:
        with zipfile.ZipFile(archive) as source:
            for name in source.namelist():
                top, _, rest = name.partition("/")
                if top == "native":
                    tag, _, rest = rest.partition("/")
                    if tag != sys.implementation.cache_tag:
                        continue
                elif top != "lib":
                    continue
                target = pathlib.Path(made, "lib", rest)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read(name))
        try:
            pathlib.Path(made).rename(folder)
        except OSError:
            if not (folder / "lib").is_dir():  # another process was faster
                raise


if __name__ == "__main__":
    main()
