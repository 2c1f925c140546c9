"""Checkpoints of AutoTP, with shards of different widths, and a file of patterns for a source that says nothing."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

PATTERNS = r"""
version: 1
rules:
  - {pattern: '(embed|norm)\.(weight|bias)', kind: replicate}
  - {pattern: 'up\.(weight|bias)', kind: shard-v}
  - {pattern: 'down\.weight', kind: shard-h}
  - {pattern: 'down\.bias', kind: replicate}
"""
SOURCES = {
    "odd": ("tp=2,dp=1,zero=1", 45),
    "even": ("tp=2,dp=1,zero=1", 46),
    "odd-zero3": ("tp=2,dp=1,zero=3", 45),
    "silent": ("tp=1,dp=2,zero=1", 46),
}
TARGETS = [
    ("odd", "tp=1,dp=2,zero=1"),
    ("odd", "tp=2,dp=1,zero=1"),
    ("odd", "tp=2,dp=1,zero=2"),
    ("even", "tp=1,dp=2,zero=2"),
    ("odd-zero3", "tp=1,dp=2,zero=3"),
    ("odd-zero3", "tp=2,dp=1,zero=1"),
    ("silent", "tp=2,dp=1,zero=1"),
]
TOLERANCE = 1e-6


def by_cut(runs: list[dict]) -> dict[str, list[float]]:
    """AutoTP leaves groups of processes behind: one launch for each tensor-parallel degree."""
    losses: dict[str, list[float]] = {}
    for tp in (1, 2):
        losses |= launch([run for run in runs if Topology.parse(run["topology"]).tp == tp])
    return losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    runs = [
        {"name": name, "model": "cut", "inner": inner, "topology": layout, "steps": 5, "save_at": 2,
         "save": str(root / name / "step-00000002")}
        for name, (layout, inner) in SOURCES.items()
    ]  # fmt: skip
    return root, by_cut(runs)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    patterns = out / "patterns.yaml"
    patterns.write_text(PATTERNS)
    runs = []
    for source, target in TARGETS:
        folder = out / f"{source} to {target}" / "step-00000002"
        told = patterns if source == "silent" else None
        wanted = Conversion(
            source=root / source / "step-00000002", target=folder, topology=Topology.parse(target), patterns=told
        )
        convert(wanted, RunOptions(reread=True))
        runs.append({"name": f"{source} -> {target}", "model": "cut", "inner": SOURCES[source][1], "topology": target,
                     "steps": 3, "load": str(folder)})  # fmt: skip
    return by_cut(runs)


@pytest.mark.parametrize(("source", "target"), TARGETS)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(source, target, uninterrupted, resumed):
    expected = uninterrupted[1][source][2:]
    assert resumed[f"{source} -> {target}"] == pytest.approx(expected, abs=TOLERANCE, rel=0)
