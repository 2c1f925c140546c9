"""Builds `kubectl-etj` as one file for each platform, with archives and a manifest for krew: `make plugin`.

The file is a zip archive with a first line that starts Python, and needs Python 3.11 or newer and nothing else. The
same commit, requirements.lock and version of zlib give the same bytes. Pure modules come from the installed packages,
compiled ones (pydantic_core) from wheels of their version that pip downloads; `--installed` takes those of this
interpreter instead, and builds for this machine only.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import importlib.metadata
import io
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from release.pins import read_pins

ROOT = Path(__file__).parents[1]
NATIVE = "pydantic_core"
"""The only distribution whose compiled modules are needed; PyYAML and charset_normalizer do without theirs."""

DISTRIBUTIONS = (
    "annotated-types", "certifi", "charset-normalizer", "durationpy", "idna", "kubernetes", "oauthlib", "pydantic",
    NATIVE, "python-dateutil", "PyYAML", "requests", "requests-oauthlib", "rich", "six", "typing-extensions",
    "typing-inspection", "urllib3", "websocket-client",
)  # fmt: skip
"""Packages that the program imports, without those that only rich's Markdown and asyncio need."""

_PACKAGES = ("api", "client", "manifests", "observed", "planning", "plugin", "reconcile")
"""Packages of the operator that the plugin may import, as the contracts in pyproject.toml say."""

_LEFT_OUT = re.compile(
    r"kubernetes/(aio/|client/(api|models)/(?!__init__))|(^|/)(tests?|__pycache__)/|\.(so|pyd|pyi|pyc)$"
    r"|^\.\.|^[^/]*dist-info/"
)
"""The generated code for the API's kinds is 125 MB, and the plugin sends plain JSON."""

_COMPILED = re.compile(r"\.(cpython-\d+|abi3)[^/]*\.so$")
_LICENCE = re.compile(r"dist-info/(licenses/)?[^/]*(LICEN[CS]E|COPYING|NOTICE|AUTHORS)[^/]*$", re.IGNORECASE)
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A platform as krew and as Python name it.

    Attributes:
        os: krew's name of the system; arch: of the processor.
        system: `sys.platform`.
        machine: `platform.machine()` in lower case.
        wheel: platform tag of the wheels, for pip.
    """

    os: str
    arch: str
    system: str
    machine: str
    wheel: str


PLATFORMS = (
    Platform(os="linux", arch="amd64", system="linux", machine="x86_64", wheel="manylinux2014_x86_64"),
    Platform(os="linux", arch="arm64", system="linux", machine="aarch64", wheel="manylinux2014_aarch64"),
    Platform(os="darwin", arch="amd64", system="darwin", machine="x86_64", wheel="macosx_10_12_x86_64"),
    Platform(os="darwin", arch="arm64", system="darwin", machine="arm64", wheel="macosx_11_0_arm64"),
)

Files = Mapping[str, bytes]
"""Content by name in the archive."""


def build(out: Path, platforms: Iterable[Platform], natives: Mapping[Platform, Files], base_url: str) -> list[Path]:
    """Write the program, its archive and the manifest to a folder.

    Args:
        out: folder to write to.
        platforms: platforms to build for.
        natives: compiled modules by platform, below `native/<cache tag>/`.
        base_url: address under which the archives will be published.

    Returns:
        Paths of the programs, one for each platform.
    """
    out.mkdir(parents=True, exist_ok=True)
    version = read_version()
    pure = {**own_files(version), **installed_files(), **licences()}
    programs, entries = [], []
    for target in platforms:
        program = make_program({**pure, **natives[target]}, target)
        path = out / f"kubectl-etj-{target.os}-{target.arch}"
        path.write_bytes(program)
        path.chmod(0o755)
        archive = make_archive({"kubectl-etj": program, "LICENSE": (ROOT / "LICENSE").read_bytes()})
        (out / f"{path.name}.tar.gz").write_bytes(archive)
        entries.append(_manifest_entry(target, f"{base_url}/{path.name}.tar.gz", hashlib.sha256(archive).hexdigest()))
        programs.append(path)
    template = (ROOT / "krew/etj.yaml.in").read_text(encoding="utf-8")
    manifest = template.replace("@VERSION@", f"v{version}").replace("@PLATFORMS@\n", "".join(entries))
    (out / "etj.yaml").write_text(manifest, encoding="utf-8")
    return programs


def make_program(files: Files, target: Platform) -> bytes:
    """Return the single file: a line that starts Python, and a zip archive."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    tags = sorted({name.split("/")[1] for name in files if name.startswith("native/")})
    start = (ROOT / "krew/bootstrap.py").read_text(encoding="utf-8")
    for line, filled in (
        ('BUILD = "unbuilt"', f'BUILD = "{digest.hexdigest()[:24]}"'),
        ('SYSTEM, MACHINE = "", ""', f'SYSTEM, MACHINE = "{target.system}", "{target.machine}"'),
        ('INTERPRETERS: "tuple[str, ...]" = ()', f"INTERPRETERS = {tuple(tags)!r}"),
    ):
        start = start.replace(f"\n{line}", f"\n{filled}")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted({**files, "__main__.py": start.encode()}.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type, info.external_attr, info.create_system = zipfile.ZIP_DEFLATED, 0o644 << 16, 3
            archive.writestr(info, data)
    return b"#!/usr/bin/env python3\n" + content.getvalue()


def make_archive(files: Files) -> bytes:
    """Return a tar.gz in which the first file is executable; nothing in it depends on time or user."""
    content = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=content, mode="wb", compresslevel=9, mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for position, (name, data) in enumerate(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644 if position else 0o755
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def own_files(version: str) -> dict[str, bytes]:
    """Return the modules of this project that the plugin needs, and metadata with the version."""
    operator, reshard = ROOT / "operator/elastic_operator", ROOT / "reshard_job/reshard"
    paths = [operator / "__init__.py", *(path for name in _PACKAGES for path in (operator / name).rglob("*.py"))]
    found = {f"lib/elastic_operator/{path.relative_to(operator)}": path.read_bytes() for path in paths}
    for name in ("__init__", "contract", "errors", "topology"):
        found[f"lib/reshard/{name}.py"] = (reshard / f"{name}.py").read_bytes()
    metadata = f"Metadata-Version: 2.1\nName: elastic-training-operator\nVersion: {version}\n"
    found[f"lib/elastic_training_operator-{version}.dist-info/METADATA"] = metadata.encode()
    return found


def installed_files() -> dict[str, bytes]:
    """Return the pure modules and data of the distributions that the plugin needs."""
    found = {}
    for name in DISTRIBUTIONS:
        for path in importlib.metadata.files(name) or ():
            if not _LEFT_OUT.search(path.as_posix()):
                found[f"lib/{path.as_posix()}"] = Path(str(path.locate())).read_bytes()
    return found


def licences() -> dict[str, bytes]:
    """Return the licences of these distributions; they stay in the archive."""
    found = {}
    for name in DISTRIBUTIONS:
        for path in importlib.metadata.files(name) or ():
            if _LICENCE.search(path.as_posix()):
                found[f"licences/{name}/{path.name}"] = Path(str(path.locate())).read_bytes()
    return found


def installed_natives() -> dict[str, bytes]:
    """Return the compiled modules of this interpreter."""
    tag = sys.implementation.cache_tag
    paths = [path for path in importlib.metadata.files(NATIVE) or () if _COMPILED.search(path.as_posix())]
    return {f"native/{tag}/{path.as_posix()}": Path(str(path.locate())).read_bytes() for path in paths}


def downloaded_natives(target: Platform, pip: str) -> dict[str, bytes]:
    """Download the wheels of a platform, one for each version of Python, and return their compiled modules."""
    found: dict[str, bytes] = {}
    for version in _PYTHONS:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", version]
            wanted = Path(folder, "requirements.txt")
            wanted.write_text(locked_native(), encoding="utf-8")
            options += ["--require-hashes", "--requirement", str(wanted)]
            command = [pip, "download", "-q", *options, "--platform", target.wheel, "--dest", folder]
            subprocess.run(command, check=True)
            (wheel,) = Path(folder).glob("*.whl")
            found |= dict(_read_natives(wheel, f"cpython-{version.replace('.', '')}"))
    return found


def check_installed() -> None:
    """Check that the packages that go into the file are installed in their locked versions.

    Raises:
        SystemExit: they are not.
    """
    locked = read_pins(ROOT / "requirements.lock")
    for name in DISTRIBUTIONS:
        expected, found = locked[name.replace("_", "-").lower()].version, importlib.metadata.version(name)
        if expected != found:
            raise SystemExit(f"error: expected {name} {expected} as in requirements.lock, found {found}: `make setup`")


def locked_native() -> str:
    """Return the pin of the compiled distribution with its hashes, as pip reads it."""
    pin = read_pins(ROOT / "requirements.lock")[NATIVE.replace("_", "-")]
    return f"{NATIVE}=={pin.version} {' '.join(f'--hash={text}' for text in pin.hashes)}\n"


def _read_natives(wheel: Path, tag: str) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if _COMPILED.search(name):
                yield f"native/{tag}/{name}", archive.read(name)


def read_version() -> str:
    """Return the version of the project."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def this_platform() -> Platform:
    """Return the platform of this machine."""
    here = sys.platform, platform.machine().lower()
    found = [item for item in PLATFORMS if (item.system, item.machine) == here]
    if not found:
        known = ", ".join(f"{item.system} {item.machine}" for item in PLATFORMS)
        raise SystemExit(f"error: no file is built for {' '.join(here)}, only for {known}")
    return found[0]


def _manifest_entry(target: Platform, url: str, digest: str) -> str:
    return (
        f"    - selector:\n        matchLabels:\n          os: {target.os}\n          arch: {target.arch}\n"
        f"      uri: {url}\n      sha256: {digest}\n      bin: kubectl-etj\n"
    )


def main() -> int:
    """Build for the platforms of the command line."""
    parser = argparse.ArgumentParser(description="Build kubectl-etj as one file for each platform.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write to")
    parser.add_argument("--installed", action="store_true", help="only for this interpreter and machine, offline")
    parser.add_argument("--pip", default="pip", help="pip that downloads the compiled modules")
    address = "https://example.com/elastic-training-operator/releases"
    parser.add_argument("--base-url", default=f"{address}/v{read_version()}", help="where the archives will be")
    options = parser.parse_args()
    check_installed()
    targets = (this_platform(),) if options.installed else PLATFORMS
    natives = {
        item: installed_natives() if options.installed else downloaded_natives(item, options.pip) for item in targets
    }
    for path in build(options.out, targets, natives, options.base_url):
        sys.stdout.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
