"""Run a script in several processes that need not import torch and DeepSpeed again."""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from testbed import extensions

_SERVER = Path(__file__).with_name("rank_server.py")
_running: list[subprocess.Popen] = []


def common_environment() -> dict[str, str]:
    """Of every rank, whatever it is."""
    return {
        **os.environ,
        "PATH": extensions.search_path(),
        "TORCH_EXTENSIONS_DIR": str(extensions.folder()),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run_script(script: Path, arguments: list[str], own: list[dict[str, str]], logs: list[Path], limit: float) -> None:
    """Run one process for each of `own`, which is added to the common environment. Raises with a failed one's log.

    Raises:
        AssertionError: a process has failed; the others are ended then.
        TimeoutError: after `limit` seconds.
    """
    environments = [common_environment() | more for more in own]
    request = {"script": str(script), "arguments": arguments, "environments": environments, "logs": [*map(str, logs)]}
    try:
        codes = _ask(json.dumps(request), limit)
    except BaseException:
        _end()
        raise
    if any(codes):
        failed = next(rank for rank, code in enumerate(codes) if code)
        tail = logs[failed].read_text(errors="replace")[-6000:]
        raise AssertionError(f"{script.name}: rank {failed} of {len(codes)} ended with {codes[failed]}\n{tail}")


def _ask(request: str, limit: float) -> list[int | None]:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(request + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], limit)[0]:
        raise TimeoutError(f"the ranks have not ended in {limit} s: {request[:500]}")
    answer = server.stdout.readline()
    assert answer, f"the server of ranks has ended with {server.wait()}"
    return json.loads(answer)


def _server() -> subprocess.Popen:
    if not _running:
        extensions.remove_abandoned_locks(extensions.folder())
        _running.append(
            subprocess.Popen(
                [sys.executable, str(_SERVER)],
                env=common_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    return _running[0]


@atexit.register
def _end() -> None:
    """End the server and all that it has forked."""
    while _running:
        with _running.pop() as server, contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
