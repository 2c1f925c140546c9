"""Start real FSDP2 and plain torch runs and collect their losses. Helper of the DCP tests."""

import json
import tempfile
from pathlib import Path

from tests.engine.rank_client import run_script

_RANKS = Path(__file__).with_name("dcp_ranks.py")
_LIMIT_SECONDS = 300


def launch(runs: list[dict]) -> dict[str, list[float]]:
    """Do `runs` one after the other; losses by name."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.jsonl"
        results.touch()
        task = json.dumps({"runs": runs, "results": str(results)})
        run_script(_RANKS, [task], [{}], [Path(scratch) / "log"], _LIMIT_SECONDS)
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["name"]: line["losses"] for line in lines}
