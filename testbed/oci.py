"""OCI image archives (image-spec 1.1) written with nothing but the standard library. Same input, same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from testbed.errors import TestbedError

_PREFIX = "application/vnd.oci.image"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: an uncompressed tar, in memory or in a file. `name` is for people."""

    content: bytes | Path
    digest: str
    size_bytes: int
    name: str = ""

    @classmethod
    def of(cls, content: bytes | Path, name: str = "") -> Layer:
        """Measure a tar."""
        if isinstance(content, bytes):
            return cls(content=content, digest=hashlib.sha256(content).hexdigest(), size_bytes=len(content), name=name)
        with open(content, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(content=content, digest=digest, size_bytes=content.stat().st_size, name=name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image: a name, its layers from the bottom up, and how it is run.

    Attributes:
        user: number of the user as text; empty for root.
        labels: OCI annotations, which go into the image's configuration.
    """

    reference: str
    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    user: str = ""
    folder: str = "/"
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of the manifest: equal images have equal ones."""
        return _manifest(self).digest

    @property
    def size_bytes(self) -> int:
        """All layers, unpacked and uncompressed."""
        return sum(layer.size_bytes for layer in self.layers)


def architecture() -> str:
    """This machine's, in the words of the image specification.

    Raises:
        TestbedError: a machine that no image is known for.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise TestbedError(f"no images for {machine}: this builds for {' and '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[machine]


def layer_of(
    *,
    files: Mapping[str, tuple[bytes, int]] | None = None,
    folders: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
) -> Layer:
    """A small layer from memory: contents with modes, folders, symbolic links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in folders:
            archive.addfile(_entry(name, kind=tarfile.DIRTYPE, mode=_folder_mode(name)))
        for name, (content, mode) in (files or {}).items():
            archive.addfile(_entry(name, mode=mode, size=len(content)), io.BytesIO(content))
        for name, target in (links or {}).items():
            archive.addfile(_entry(name, kind=tarfile.SYMTYPE, link=target))
    return Layer.of(buffer.getvalue())


def pack(root: Path, target: Path) -> None:
    """Write the tree below `root` as a layer: sorted, owned by root, dated 1970, modes reduced to "may be executed"."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with tarfile.open(draft, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if path.is_symlink():
                archive.addfile(_entry(name, kind=tarfile.SYMTYPE, link=str(path.readlink())))
            elif path.is_dir():
                archive.addfile(_entry(name, kind=tarfile.DIRTYPE, mode=_folder_mode(name)))
            else:
                status = path.stat()
                with open(path, "rb") as stream:
                    mode = 0o755 if status.st_mode & 0o100 else 0o644
                    archive.addfile(_entry(name, mode=mode, size=status.st_size), stream)
    draft.rename(target)


def write(path: Path, images: Sequence[Image]) -> None:
    """One archive with all `images`, in which layers that they share lie once. Appears under its name when complete."""
    blobs: dict[str, Layer] = {}
    entries = []
    for image in images:
        names = {"io.containerd.image.name": image.reference, "org.opencontainers.image.ref.name": image.reference}
        top = _manifest(image)
        blobs |= {layer.digest: layer for layer in (_configuration(image), *image.layers, top)}
        entries.append({**_described(top, "manifest.v1+json"), "annotations": names})
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with tarfile.open(draft, mode="w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": entries}))
        for digest, blob in blobs.items():
            _add(archive, f"blobs/sha256/{digest}", blob.content)
    draft.rename(path)


def _described(blob: Layer, kind: str) -> dict[str, Any]:
    return {"mediaType": f"{_PREFIX}.{kind}", "digest": f"sha256:{blob.digest}", "size": blob.size_bytes}


def _manifest(image: Image) -> Layer:
    value = {
        "schemaVersion": 2,
        "mediaType": f"{_PREFIX}.manifest.v1+json",
        "config": _described(_configuration(image), "config.v1+json"),
        "layers": [_described(layer, "layer.v1.tar") for layer in image.layers],
    }
    return Layer.of(_json(value))


def _configuration(image: Image) -> Layer:
    environment = {"PATH": _DEFAULT_PATH, **image.environment}
    run = {
        "User": image.user,
        "Entrypoint": list(image.entrypoint),
        "Cmd": list(image.command),
        "Env": [f"{key}={value}" for key, value in environment.items()],
        "WorkingDir": image.folder,
        "Labels": dict(image.labels),
    }
    value = {
        "architecture": architecture(),
        "os": "linux",
        "config": {key: value for key, value in run.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in image.layers]},
    }
    return Layer.of(_json(value))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _folder_mode(name: str) -> int:
    return 0o1777 if name == "tmp" else 0o755


def _entry(name: str, *, kind: bytes = tarfile.REGTYPE, mode: int = 0o777, size: int = 0, link: str = "") -> Any:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, size, link
    return entry


def _add(archive: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        archive.addfile(_entry(name, mode=0o644, size=len(content)), io.BytesIO(content))
        return
    stream: BinaryIO
    with open(content, "rb") as stream:
        archive.addfile(_entry(name, mode=0o644, size=content.stat().st_size), stream)
