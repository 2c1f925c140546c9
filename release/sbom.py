"""Software bill of materials in CycloneDX 1.6: the distribution, and the pinned packages of each image.

The pins are `images/*/requirements.txt`, which the images are built from. What the base images bring along is not in
it: whoever builds an image chooses those.
"""

from __future__ import annotations

import datetime
import hashlib
import uuid
from pathlib import Path
from typing import Any

SPECIFICATION = "1.6"

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "elastictraining.dev")


def make_sbom(
    name: str, version: str, pins_by_image: dict[str, dict[str, str]], *, epoch: int, files: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Return the bill of materials as a JSON object.

    Args:
        name: name of the distribution.
        version: its version.
        pins_by_image: pinned packages of each image.
        epoch: time of the release, seconds since the epoch.
        files: the files of the release, which are listed with their digests.
    """
    root = f"pkg:pypi/{name}@{version}"
    images: dict[tuple[str, str], list[str]] = {}
    for image, pins in sorted(pins_by_image.items()):
        for package, pinned in pins.items():
            images.setdefault((package, pinned), []).append(image)
    components = [_make_component(*package, users) for package, users in sorted(images.items())]
    moment = datetime.datetime.fromtimestamp(epoch, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, f'{root} {epoch}')}",
        "version": 1,
        "metadata": {
            "timestamp": moment,
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": name,
                "version": version,
                "purl": root,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "components": [_make_file(path) for path in sorted(files)],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": root, "dependsOn": [item["bom-ref"] for item in components]},
            *({"ref": item["bom-ref"]} for item in components),
        ],
    }


def _make_component(package: str, version: str, images: list[str]) -> dict[str, Any]:
    # `+` starts the local part of a version, and means a space in a URL.
    purl = f"pkg:pypi/{package}@{version.replace('+', '%2B')}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": package,
        "version": version,
        "purl": purl,
        "properties": [{"name": "elastictraining.dev:image", "value": image} for image in images],
    }


def _make_file(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "type": "file",
        "bom-ref": f"file:{path.name}",
        "name": path.name,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
