"""Training goes on from converted DCP checkpoints in unmodified torch: losses of the run that never stopped."""

from pathlib import Path

import pytest

from reshard.api import Conversion, convert, index_of
from reshard.topology import Topology
from tests.engine import dcp_run

pytestmark = pytest.mark.engine

SOURCES = {
    "four": {"dp": 4, "style": "flat"},
    "single": {"sharded": False, "style": "nested"},
    "grid": {"dp": 2, "tp": 2, "style": "titan"},
    "velocity": {"dp": 3, "style": "nested", "optimizer": "velocity"},
}
CASES = {
    "four to three": ("four", {"dp": 3}),
    "four to one": ("four", {"sharded": False}),
    "one to four": ("single", {"dp": 4}),
    "two by two to two": ("grid", {"dp": 2}),
    "three to two by two": ("velocity", {"dp": 2, "tp": 2}),
}
SAVED, STEPS = 4, 3


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def sources(root) -> dict[str, list[float]]:
    """Losses of runs that went on without a stop, from the step at which they saved."""
    steps = SAVED + STEPS
    runs = [
        {**options, "name": name, "steps": steps, "save_at": SAVED, "save": str(root / name)}
        for name, options in SOURCES.items()
    ]
    found = dcp_run.launch(runs)
    return {name: losses[SAVED:] for name, losses in found.items()}


@pytest.fixture(scope="module")
def resumed(root, sources) -> dict[str, list[float]]:
    """Losses of runs that loaded what was converted."""
    runs = []
    for name, (source, options) in CASES.items():
        world = options.get("dp", 1) * options.get("tp", 1)
        target = root / name.replace(" ", "-")
        topology = Topology(dp=options.get("dp", 1), tp=options.get("tp", 1), zero=3 if world > 1 else 1)
        report = convert(Conversion(source=root / source, target=target, topology=topology))
        assert report.verified
        kept = {key: value for key, value in SOURCES[source].items() if key in ("style", "optimizer")}
        runs.append({**kept, **options, "name": name, "first": SAVED, "steps": STEPS, "load": str(target)})
    runs.append({"name": "nothing loaded", "sharded": False, "first": SAVED, "steps": STEPS})
    return dcp_run.launch(runs)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_run_that_never_stopped(name, sources, resumed):
    expected = sources[CASES[name][0]]
    assert resumed[name] == pytest.approx(expected, abs=1e-6)


def test_a_run_that_loads_nothing_has_other_losses(sources, resumed):
    assert all(
        abs(found - expected) > 1e-3 for found, expected in zip(resumed["nothing loaded"], sources["four"], strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_every_byte_is_read_once(name, root, resumed, tmp_path):
    source, options = CASES[name]
    topology = Topology(dp=options.get("dp", 1) * options.get("tp", 1), zero=3)
    report = convert(Conversion(source=root / source, target=tmp_path / "again", topology=topology))
    assert report.bytes_read == sum(tensor.num_bytes for tensor in index_of(root / source).tensors)
