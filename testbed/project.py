"""The project's own images, built without a container engine. `testbed.cluster.ensure_images` brings them to nodes.

Layers are kept in the cache under a hash of what they are made from, so a rebuild after an edit takes seconds. All
images lie in one archive, named by its contents; a node imports it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from testbed import oci, rootfs
from testbed.paths import cache_dir, state_dir
from testbed.shell import say

CHECKOUT = Path(__file__).parents[1]
VERSION: str = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
OPERATOR = f"localhost/elastic-training-operator:{VERSION}"
RESHARD = f"localhost/elastic-training-reshard:{VERSION}"
EXAMPLE = f"localhost/elastic-training-example:{VERSION}"

_SOURCES = (rootfs.BUILD_PINS, "pyproject.toml", "README.md", "LICENSE", "operator", "reshard_job", "trainer")
_KEPT_LAYERS = 3
"""Of each kind; older ones are removed from the cache."""

_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """One build at a time; others wait for it."""
    folder = cache_dir() / "image-layers"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def ensure_built(folder: Path | None = None) -> tuple[oci.Image, ...]:
    """The images of this checkout, written as an archive into the folder that nodes import from.

    Hold `lock()` meanwhile, and until the archive has been read.

    Args:
        folder: of archives; by default the test bed's.

    Raises:
        TestbedError: a program failed or is missing.
    """
    made = definitions()
    path = archive(made, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        oci.write(path, made)
    for other in path.parent.glob("elastic-*.tar"):
        if other != path:
            other.unlink(missing_ok=True)
    return made


def archive(built: Iterable[oci.Image], folder: Path | None = None) -> Path:
    """Return the archive that `ensure_built` writes: for `podman load`, `docker load` and `ctr images import`."""
    return (folder or state_dir() / "images") / f"elastic-{_key(*(image.digest for image in built))}.tar"


def definitions() -> tuple[oci.Image, ...]:
    """The images, layer by layer; the counterpart of images/*/Dockerfile."""
    base = _layer("python", _interpreter_key(), rootfs.interpreter)
    code = _layer("project", _tree_key(_SOURCES), lambda root: rootfs.project(root, CHECKOUT))
    examples = _layer("examples", _tree_key(["examples"]), _examples)
    operator, reshard = (_packages(name) for name in ("operator", "reshard"))
    return (
        _image(OPERATOR, "The elastic training operator", (base, operator, code), ("elastic-operator",)),
        _image(RESHARD, "Converts training checkpoints between topologies", (base, reshard, code), ("reshard",)),
        _image(EXAMPLE, "Example training, with torch and DeepSpeed from the node", (base, reshard, code, examples)),
    )


def _image(reference: str, title: str, layers: tuple[oci.Layer, ...], entrypoint: tuple[str, ...] = ()) -> oci.Image:
    labels = {
        "org.opencontainers.image.title": title,
        "org.opencontainers.image.version": VERSION,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    return oci.Image(
        reference=reference,
        layers=layers,
        entrypoint=entrypoint,
        command=() if entrypoint else ("python",),
        environment=_ENVIRONMENT,
        user=f"{rootfs.USER}:{rootfs.USER}",
        folder="/" if entrypoint else "/app",
        labels=labels,
    )


def _packages(name: str) -> oci.Layer:
    requirements = CHECKOUT / "images" / name / "requirements.txt"
    key = _key(_interpreter_key(), requirements.read_text())
    return _layer(f"packages-{name}", key, lambda root: rootfs.packages(root, requirements))


def _examples(root: Path) -> None:
    shutil.copytree(CHECKOUT / "examples", root / "app/examples", ignore=shutil.ignore_patterns("__pycache__"))


def _layer(kind: str, key: str, build: Callable[[Path], None]) -> oci.Layer:
    """From the cache, else built in a fresh folder."""
    folder = cache_dir() / "image-layers"
    target = folder / f"{kind}-{key}.tar"
    if target.exists():
        os.utime(target)
        return oci.Layer.of(target, kind)
    say(f"images: building layer {kind}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{kind}-") as draft:
        root = Path(draft) / "root"
        root.mkdir()
        build(root)
        oci.pack(root, target)
    mine = [path for path in folder.glob(f"{kind}-*.tar") if path.stem.rpartition("-")[0] == kind]
    for old in sorted(mine, key=lambda path: path.stat().st_mtime)[:-_KEPT_LAYERS]:
        old.unlink(missing_ok=True)
    return oci.Layer.of(target, kind)


def _interpreter_key() -> str:
    return _key(rootfs.RECIPE, sys.version, sys.base_prefix, oci.architecture())


def _tree_key(names: Iterable[str]) -> str:
    """Hash of the names and contents of files of the checkout."""
    parts = [rootfs.RECIPE, sys.version]
    for name in names:
        top = CHECKOUT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                parts.append(f"{path.relative_to(CHECKOUT)} {content}")
    return _key(*parts)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
