"""The chart as an OCI image layout in a tar, with Helm's media types: oras and skopeo copy it to a registry.

The layout holds the chart package as it is. The same package gives the same bytes, so the digest of the manifest is
known before anything is in a registry.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import yaml

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def pack_layout(package: Path, target: Path, *, epoch: int) -> Path:
    """Write the layout of a chart package into the folder `target`, under the version of the chart as its tag.

    Args:
        package: a chart package, `NAME-VERSION.tgz`.
        target: folder of the layout.
        epoch: modification time of all files, seconds since the epoch.
    """
    content = package.read_bytes()
    about = read_metadata(package)
    blobs: dict[str, bytes] = {}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _describe(_encode(about), CONFIG, blobs),
        "layers": [_describe(content, CONTENT, blobs)],
        "annotations": {
            "org.opencontainers.image.title": about["name"],
            "org.opencontainers.image.version": about["version"],
            "org.opencontainers.image.description": about["description"],
        },
    }
    entry = _describe(_encode(manifest), MANIFEST, blobs)
    entry["annotations"] = {"org.opencontainers.image.ref.name": about["version"]}
    files = {"oci-layout": _encode({"imageLayoutVersion": "1.0.0"})}
    files["index.json"] = _encode({"schemaVersion": 2, "manifests": [entry]})
    files |= {f"blobs/{digest.replace(':', '/')}": data for digest, data in sorted(blobs.items())}
    layout = target / f"{about['name']}-{about['version']}.chart.oci.tar"
    with tarfile.open(layout, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("blobs", "blobs/sha256"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode, folder.mtime = tarfile.DIRTYPE, 0o755, epoch
            archive.addfile(folder)
        for name, data in files.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode, file.mtime = len(data), 0o644, epoch
            archive.addfile(file, io.BytesIO(data))
    return layout


def read_metadata(package: Path) -> dict[str, Any]:
    """Return what `Chart.yaml` in a chart package says."""
    with tarfile.open(package) as archive:
        name = next(
            entry.name for entry in archive if entry.name.count("/") == 1 and entry.name.endswith("/Chart.yaml")
        )
        file = archive.extractfile(name)
        assert file is not None
        about: dict[str, Any] = yaml.safe_load(file.read())
    return about


def _describe(data: bytes, media_type: str, blobs: dict[str, bytes]) -> dict[str, Any]:
    """Add a blob; return its descriptor."""
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    blobs[digest] = data
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


def _encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
