"""Container images made from nothing: OCI archives without Docker, a registry or a compiler.

`localhost/pause:1` keeps a pod's namespaces open. `localhost/hostpy:1` is an empty root whose /bin and /lib point into
/usr; pods mount the machine's own /usr, Python and virtual environment into it (see `testbed.podenv`). The images
of the project itself are made by `testbed.project`.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path

from testbed import oci

PAUSE = "localhost/pause:1"
HOST_PYTHON = "localhost/hostpy:1"

# The pause(2) system call in a loop, as machine code.
_PAUSE_CODE = {
    "x86_64": (62, bytes.fromhex("b8220000000f05ebf7")),  # mov eax,34; syscall; jmp
}
_PASSWD = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUP = b"root:x:0:\nnogroup:x:65534:\n"
_NSSWITCH = b"passwd: files\ngroup: files\nhosts: files dns\n"


def write_all(folder: Path) -> None:
    """Write both archives into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pause = oci.layer_of(files={"pause": (pause_program(platform.machine()), 0o755)})
    oci.write(folder / "pause.tar", [oci.Image(reference=PAUSE, layers=(pause,), entrypoint=("/pause",))])
    root = oci.layer_of(
        files={
            "etc/passwd": (_PASSWD, 0o644),
            "etc/group": (_GROUP, 0o644),
            "etc/nsswitch.conf": (_NSSWITCH, 0o644),
        },
        folders=["dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var"],
        links={name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")},
    )
    oci.write(folder / "hostpy.tar", [oci.Image(reference=HOST_PYTHON, layers=(root,), entrypoint=("/bin/sh",))])


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
