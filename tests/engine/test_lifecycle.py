"""The life of a model: pretrained, resharded, fine-tuned and generated from, with equal losses at each hand-over."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.rank_client import common_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.soak_only]

ROOT = Path(__file__).parents[2]


def test_each_framework_continues_with_the_losses_of_the_one_before(tmp_path):
    steps = ("--pretrained", "4", "--resumed", "6", "--finetuned", "3")
    folders = ("--output", str(tmp_path / "output"), "--picture", str(tmp_path / "picture.png"))
    own = {name: value for name, value in common_environment().items() if not name.startswith(("ETJ_", "PET_"))}
    command = [sys.executable, "-m", "demo.lifecycle", *steps, *folders]
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    logs = [path.read_text(errors="replace")[-3000:] for path in tmp_path.glob("output/*.log")]
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:], *logs)
    report = json.loads((tmp_path / "output/report.json").read_text())
    assert len(report["checks"]) == 2
    assert all(check["relative"] < 1e-5 for check in report["checks"])
    assert report["evaluations"]["fine-tuned"] < report["evaluations"]["pretrained, first topology"]
    assert report["text"].startswith("The ")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
