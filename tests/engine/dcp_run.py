"""Start real FSDP2 and plain torch runs and collect their losses. Helper of the DCP tests."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_RANKS = Path(__file__).with_name("dcp_ranks.py")
_LIMIT_SECONDS = 300


def launch(runs: list[dict]) -> dict[str, list[float]]:
    """Do `runs` one after the other; losses by name."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.jsonl"
        results.touch()
        task = json.dumps({"runs": runs, "results": str(results)})
        done = subprocess.run(
            [sys.executable, str(_RANKS), task],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        if done.returncode:
            raise AssertionError(done.stdout.decode(errors="replace")[-6000:])
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["name"]: line["losses"] for line in lines}
