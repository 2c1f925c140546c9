"""Trees of files that layers are made of: an interpreter, packages, the project. Laid out as by images/*/Dockerfile.

The interpreter is this machine's own, moved to /usr/local, with the shared libraries that the dynamic linker reports.
Nothing in a tree names the machine's own folders, except the interpreter's record of how it was built.
"""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from testbed.errors import TestbedError
from testbed.paths import cache_dir
from testbed.shell import run

USER = 65532
"""Number of the user that the images run as, as in distroless images."""

RECIPE = Path(__file__).read_text()
"""Of the trees: part of the keys under which they are kept. Read with the code, not when it has been edited since."""

PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
BUILD_PINS = "release/build-requirements.txt"
"""What builds the wheel; another version may write other bytes."""

SITE = f"usr/local/lib/{PYTHON}/site-packages"
_USELESS = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "site-packages")
_USELESS_FILES = ("__pycache__", "_tkinter*", "_test*", "_ctypes_test*", "config-*", "dist-packages", "turtle.py")
# What binary wheels may link to beside the C library (manylinux), torch's among them.
_COMMON_LIBRARIES = (
    *("libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1"),
    *("libstdc++.so.6", "libutil.so.1", "libz.so.1"),
)
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_NEVER_IMPORTED = ("kubernetes/client", "kubernetes/aio/client")
"""Folders whose `api` and `models` no image needs: the Kubernetes client's generated code, 70 MB without byte code."""

_ABOUT_THIS_MACHINE = ("direct_url.json", "uv_cache.json", "REQUESTED", ".lock")
"""Files that an installed package does not need."""

_PASSWD = f"root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:{USER}:{USER}:nonroot:/home/nonroot:/sbin/nologin\n"
_GROUP = f"root:x:0:\nnonroot:x:{USER}:\n"
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"


def interpreter(root: Path) -> None:
    """Python with its standard library, what it links to, certificates and the user; no shell, no package manager."""
    for folder in ("dev", "home/nonroot", "proc", "root", "run", "sys", "tmp", "usr/bin", "usr/sbin", "var", SITE):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    binaries = root / "usr/local/bin"
    binaries.mkdir()
    shutil.copyfile(Path(sys.base_prefix, "bin", PYTHON).resolve(), binaries / PYTHON)
    (binaries / PYTHON).chmod(0o755)
    for name in ("python", "python3"):
        (binaries / name).symlink_to(PYTHON)
    library = root / "usr/local/lib" / PYTHON
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        library,
        ignore=shutil.ignore_patterns(*_USELESS, *_USELESS_FILES),
        dirs_exist_ok=True,
        symlinks=True,
    )
    if "dist-packages" in (library / "site.py").read_text():  # Debian's own Python looks there
        (library / "dist-packages").symlink_to("site-packages")
    _etc(root / "etc")
    add_libraries(root, base_libraries())
    run(shutil.which("ldconfig") or "/sbin/ldconfig", "-r", root)
    shutil.rmtree(root / "var/cache", ignore_errors=True)
    compile_tree(root)


def packages(root: Path, requirements: Path) -> None:
    """The pinned packages of a requirements file with their hashes, and nothing that the file does not name."""
    _install(root, "--require-hashes", "--requirement", str(requirements))
    for folder in (root / SITE / client / part for client in _NEVER_IMPORTED for part in ("api", "models")):
        for path in folder.glob("*.py"):
            if path.name != "__init__.py":
                path.unlink()
    needed = libraries(sorted((root / SITE).rglob("*.so*")))
    add_libraries(root, {name: needed[name] for name in needed.keys() - base_libraries().keys()})
    compile_tree(root)


def project(root: Path, checkout: Path) -> None:
    """The project's wheel, built from `checkout`, with its commands in /usr/local/bin."""
    wheels = root.with_name(root.name + ".wheels")
    pins = ("--require-hashes", "--build-constraints", str(checkout / BUILD_PINS))
    run(uv(), "build", "--quiet", "--wheel", *pins, "--python", sys.executable, "--out-dir", wheels, checkout)
    (wheel,) = wheels.glob("*.whl")
    _install(root, str(wheel))
    shutil.rmtree(wheels)
    compile_tree(root)


def uv() -> Path:
    """The package installer that `make setup` keeps in the cache, else the one on PATH.

    Raises:
        TestbedError: there is neither.
    """
    kept = sorted(cache_dir().glob("uv-*/bin/uv"))
    found = kept[-1] if kept else shutil.which("uv")
    if found is None:
        raise TestbedError(f"images are installed with uv, which is neither in {cache_dir()} nor on PATH: `make setup`")
    return Path(found)


def libraries(programs: Iterable[Path]) -> dict[str, Path]:
    """Shared libraries that programs need, by name, as the dynamic linker of this machine finds them.

    Raises:
        TestbedError: one is not found.
    """
    paths = [str(path) for path in programs]
    if not paths:
        return {}
    # ldd fails for files that are no dynamic programs, which is fine; what it prints decides.
    done = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False)
    if absent := sorted(set(re.findall(r"(\S+) => not found", done.stdout))):
        raise TestbedError(f"shared libraries that {paths[0]} and others need are not on this machine: {absent}")
    found = re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", done.stdout, flags=re.MULTILINE)
    return {Path(name).name: Path(name) for name in found}


def base_libraries() -> dict[str, Path]:
    """Shared libraries in the interpreter's layer: its own, and those of the system that any package may count on.

    Raises:
        TestbedError: one is not found.
    """
    modules = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    found = libraries([Path(sys.base_prefix, "bin", PYTHON), *(path for path in modules if "_tk" not in path.name)])
    folder = found["libc.so.6"].parent
    common = {name: folder / name for name in _COMMON_LIBRARIES}
    if absent := [name for name, path in common.items() if not path.exists()]:
        raise TestbedError(f"shared libraries that wheels count on are not in {folder}: {', '.join(absent)}")
    return found | common


def add_libraries(root: Path, found: Mapping[str, Path]) -> None:
    """Copy libraries from outside of `root` into it: the system's to the same place, others to /usr/local/lib."""
    for name, path in sorted(found.items()):
        if path.is_relative_to(root):
            continue
        place = path.parent.resolve()
        ours = place.is_relative_to("/usr/lib") or place.is_relative_to("/usr/lib64")
        folder = root / (place.relative_to("/") if ours else "usr/local/lib")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.resolve(), folder / name)
        (folder / name).chmod(0o755)


def compile_tree(root: Path) -> None:
    """Byte code beside all modules, valid whatever the files' dates: an image has a read-only root."""
    arguments = ("-q", "-f", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/")
    run(sys.executable, "-I", "-m", "compileall", *arguments, root / "usr/local/lib" / PYTHON)


def _install(root: Path, *what: str) -> None:
    site = root / SITE
    site.mkdir(parents=True)
    options = ("--quiet", "--no-deps", "--link-mode", "copy", "--python", sys.executable, "--target", str(site))
    run(uv(), "pip", "install", *options, *what)
    # Where a wheel came from, and locks, are facts of this machine.
    for name in _ABOUT_THIS_MACHINE:
        for path in site.rglob(name):
            path.unlink()
    for record in site.glob("*.dist-info/RECORD"):
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if Path(line.split(",")[0]).name not in _ABOUT_THIS_MACHINE))
    scripts = root / "usr/local/bin"
    scripts.mkdir(parents=True)
    for path in sorted((site / "bin").glob("*")):
        text = path.read_bytes()
        if text.startswith(b"#!"):
            text = b"#!/usr/local/bin/python3\n" + text.split(b"\n", 1)[1]
        (scripts / path.name).write_bytes(text)
        (scripts / path.name).chmod(0o755)
    shutil.rmtree(site / "bin", ignore_errors=True)


def _etc(folder: Path) -> None:
    (folder / "ssl/certs").mkdir(parents=True)
    if _CERTIFICATES.exists():
        shutil.copyfile(_CERTIFICATES, folder / "ssl/certs" / _CERTIFICATES.name)
        for name in {ssl.get_default_verify_paths().openssl_cafile, "/etc/ssl/cert.pem"}:
            link = folder.parent / name.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(_CERTIFICATES)
    texts = {"passwd": _PASSWD, "group": _GROUP, "nsswitch.conf": _NSSWITCH, "ld.so.conf": "/usr/local/lib\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
