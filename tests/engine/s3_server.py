"""A real S3-compatible server on this machine (Versity S3 Gateway, built from its Go module) for the reshard tests."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from testbed.paths import cache_dir

VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
ACCESS, SECRET = "reshard", "reshard-secret"


def program() -> Path | None:
    """The server's program, built once per machine; None where there is neither it nor Go."""
    found = cache_dir() / f"versitygw-{VERSION}" / "versitygw"
    if not found.exists():
        if shutil.which("go") is None:
            return None
        draft = found.parent.with_name(f".{found.parent.name}.{os.getpid()}")
        own = {"GOBIN": str(draft), "GOFLAGS": "-modcacherw", "CGO_ENABLED": "0"}
        environment = {"GOGC": "400", **os.environ, **own}
        subprocess.run(["go", "install", MODULE], env=environment, check=True, capture_output=True)
        with contextlib.suppress(OSError):
            draft.rename(found.parent)
        shutil.rmtree(draft, ignore_errors=True)
    return found


class Server:
    """A running server: every folder of `root` is a bucket."""

    def __init__(self, root: Path, log: Path, port: int) -> None:
        self.root = root
        self.log = log
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def gets(self) -> list[str]:
        """Lines of the server's log about data that was fetched."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if "| GET |" in line and ".pt" in line]


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Run the server for a while."""
    executable = program()
    assert executable is not None
    root, log = folder / "buckets", folder / "server.log"
    root.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(executable), "--port", f"127.0.0.1:{port}", "--access", ACCESS, "--secret", SECRET]
    with open(log, "wb") as stream:
        process = subprocess.Popen([*command, "posix", str(root)], stdout=stream, stderr=stream)
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.05)
            yield Server(root, log, port)
        finally:
            process.terminate()
            process.wait(timeout=10)
