"""A PipelineModule without ZeRO, with real DeepSpeed: its optimizer numbers parameters, of each stage from 0 on.

Two steps, save, convert, load with unmodified `engine.load_checkpoint`, three more steps. The losses must be those of
the run that was never interrupted.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.reshard_run import goes_on, launch_all, save_all

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

SOURCES = ("tp=2,pp=2,dp=1,zero=0", "tp=1,pp=2,dp=2,zero=1")
PAIRS = [
    (SOURCES[0], "tp=1,pp=2,dp=2,zero=1"),
    (SOURCES[0], "tp=1,pp=4,dp=1,zero=0"),
    (SOURCES[1], "tp=2,pp=2,dp=1,zero=0"),
    (SOURCES[1], "tp=1,pp=1,dp=4,zero=0"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    return root, save_all(root, {name: {"model": "pipeline", "topology": name} for name in SOURCES})


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    runs = []
    for source, target in PAIRS:
        run = {"name": f"{source} -> {target}", "model": "pipeline", "topology": target}
        runs.append(goes_on(root, source, out, run))
    return launch_all(runs)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(source, target, uninterrupted, resumed):
    assert resumed[f"{source} -> {target}"] == pytest.approx(uninterrupted[1][source][2:], abs=1e-6, rel=0)
