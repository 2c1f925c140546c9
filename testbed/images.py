"""Container images made from nothing: OCI archives without Docker, a registry or a compiler.

`localhost/pause:1` keeps a pod's namespaces open. `localhost/hostpy:1` is an empty root whose /bin and /lib point into
/usr; pods mount the machine's own /usr, Python and virtual environment into it (see `testbed.podenv`).
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import struct
import tarfile
from pathlib import Path

PAUSE = "localhost/pause:1"
HOST_PYTHON = "localhost/hostpy:1"

# The pause(2) system call in a loop, as machine code.
_PAUSE_CODE = {
    "x86_64": (62, bytes.fromhex("b8220000000f05ebf7")),  # mov eax,34; syscall; jmp
}
_ARCHITECTURE = {"x86_64": "amd64"}
_PASSWD = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUP = b"root:x:0:\nnogroup:x:65534:\n"
_NSSWITCH = b"passwd: files\ngroup: files\nhosts: files dns\n"


def write_all(folder: Path) -> None:
    """Write both archives into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _image(folder / "pause.tar", PAUSE, _layer(files={"pause": (pause_program(platform.machine()), 0o755)}), ["/pause"])
    root = _layer(
        files={
            "etc/passwd": (_PASSWD, 0o644),
            "etc/group": (_GROUP, 0o644),
            "etc/nsswitch.conf": (_NSSWITCH, 0o644),
        },
        folders=["dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var"],
        links={name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")},
    )
    _image(folder / "hostpy.tar", HOST_PYTHON, root, ["/bin/sh"])


def pause_program(machine: str) -> bytes:
    """A complete static ELF program that does nothing until it is killed."""
    kind, code = _PAUSE_CODE[machine]
    base, headers = 0x400000, 64 + 56
    size = headers + len(code)
    elf = struct.pack(
        "<4sBBBBB7xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 0, 0),
        *(2, kind, 1, base + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0),
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return elf + segment + code


def _layer(
    *,
    files: dict[str, tuple[bytes, int]] | None = None,
    folders: list[str] | None = None,
    links: dict[str, str] | None = None,
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in folders or []:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        for name, (content, mode) in (files or {}).items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return buffer.getvalue()


def _image(path: Path, reference: str, layer: bytes, entrypoint: list[str]) -> None:
    """OCI image layout (image-spec 1.1) with one layer, as a tar archive."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    prefix = "application/vnd.oci.image"
    layers = [blob(layer, f"{prefix}.layer.v1.tar")]
    config = {
        "architecture": _ARCHITECTURE[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{prefix}.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), f"{prefix}.config.v1+json"),
        "layers": layers,
    }
    names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference}
    entry = {**blob(json.dumps(manifest).encode(), f"{prefix}.manifest.v1+json"), "annotations": names}
    index = {"schemaVersion": 2, "manifests": [entry]}
    content = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        **{f"blobs/sha256/{digest}": data for digest, data in blobs.items()},
    }
    path.write_bytes(_layer(files={name: (data, 0o644) for name, data in content.items()}))
