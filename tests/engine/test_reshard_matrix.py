"""From framework to framework over several formats, with optimizer state: losses go on as if nothing had happened.

Five steps, save, convert once or more, load with the unmodified framework, three more steps. In fp32 and without a
pipeline, what `--like` names holds the values of another run, so that a tensor taken from it would show; in bf16 and
with a pipeline it is the source itself.
"""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology
from tests.engine import dcp_run, reshard_run
from tests.randomness import some

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

SAVED, STEPS = 5, 3  # the rate of the DeepSpeed runs is 2e-2 from step 4
BF16 = {"model": "flat", "bf16": True}
SOURCES = {
    "zero1": {"model": "flat", "topology": "dp=2,zero=1"},
    "zero2": {"model": "flat", "topology": "dp=2,zero=2"},
    "zero3": {"model": "flat", "topology": "dp=2,zero=3"},
    "bf16": {**BF16, "topology": "dp=2,zero=2"},
    "pipeline": {"model": "pipeline", "topology": "tp=2,pp=2,dp=1,zero=1"},
}
"""DeepSpeed runs; `torch` is FSDP2 with DCP, of the flat model, which has no warm-up."""

CHAINS = {
    "zero1 > dcp > zero3": ("zero1", ("dcp dp=2", "deepspeed dp=3,zero=3")),
    "zero2 > dcp > zero1": ("zero2", ("dcp dp=4", "deepspeed dp=3,zero=1")),
    "zero3 > universal > zero2": ("zero3", ("universal zero=1", "deepspeed dp=3,zero=2")),
    "zero2 > universal > dcp > zero3": ("zero2", ("universal zero=2", "dcp dp=3", "deepspeed dp=3,zero=3")),
    "torch > zero2": ("torch", ("deepspeed dp=3,zero=2",)),
    "torch > universal > zero1": ("torch", ("universal zero=1", "deepspeed dp=3,zero=1")),
    "bf16 > dcp > zero3": ("bf16", ("dcp dp=2", "deepspeed dp=3,zero=3")),
    "bf16 > universal > zero1": ("bf16", ("universal zero=1", "deepspeed dp=3,zero=1")),
    "pipeline > universal > pp2": ("pipeline", ("universal zero=1", "deepspeed pp=2")),
    "pipeline > dcp > tp2": ("pipeline", ("dcp dp=3", "deepspeed tp=2")),
    "zero1 > dcp > fsdp": ("zero1", ("dcp dp=3",)),
    "zero2 > universal > dcp > plain torch": ("zero2", ("universal zero=1", "dcp dp=1")),
    "zero3 > zero1 > dcp > fsdp": ("zero3", ("deepspeed dp=4,zero=1", "dcp dp=2")),
    "bf16 > universal > dcp > zero2": ("bf16", ("universal zero=1", "dcp dp=2", "deepspeed dp=3,zero=2")),
}
"""Name -> source, and what it becomes one after the other."""

NAMES = some(CHAINS, every=2)

TOLERANCE = {"bf16": 5e-4}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def launch(runs: list[dict]) -> dict[str, list[float]]:
    """One set of processes per kind of model and world size: a PipelineModule leaves global state behind."""

    def key(run: dict) -> tuple[str, int]:
        return run["model"], Topology.parse(run["topology"]).world_size

    losses: dict[str, list[float]] = {}
    for _, group in itertools.groupby(sorted(runs, key=key), key=key):
        runs_of_one = sorted(group, key=lambda run: (run["topology"], bool(run.get("bf16"))))
        losses |= reshard_run.launch(runs_of_one)
    return losses


@pytest.fixture(scope="module")
def uninterrupted(root) -> dict[str, list[float]]:
    """Losses after the save of runs that went on, and a checkpoint of each."""
    run = {"steps": SAVED + STEPS, "save_at": SAVED}
    fsdp = {**run, "name": "torch", "model": "deepspeed", "dp": 2, "lr": 2e-2, "save": str(root / "torch")}
    found = dcp_run.launch([fsdp])
    found |= launch([{**run, **case, "name": name, "save": str(root / name)} for name, case in SOURCES.items()])
    return {name: losses[SAVED:] for name, losses in found.items()}


@pytest.fixture(scope="module")
def likes(root, uninterrupted) -> dict[str, Path]:
    """For each source a DeepSpeed checkpoint of its model with the tensors of another run, where there is one."""
    foreign = root / "foreign"
    convert(conversion(root / "torch", foreign, "deepspeed dp=2,zero=1", root / "zero1"), RunOptions(reread=True))
    return {
        "torch": root / "zero1",
        "bf16": root / "bf16",
        "pipeline": root / "pipeline",
        **dict.fromkeys(("zero1", "zero2", "zero3"), foreign),
    }


def conversion(source: Path, target: Path, words: str, like: Path | None) -> Conversion:
    name, topology = words.split()
    return Conversion(
        source=source,
        target=target,
        topology=Topology.parse(topology),
        target_format=name,
        like=None if name == "dcp" else like,
    )


@pytest.fixture(scope="module")
def resumed(root, uninterrupted, likes) -> dict[str, list[float]]:
    """Losses of runs that loaded the end of each chain."""
    ours, torchs = [], []
    for name in NAMES:
        source, formats = CHAINS[name]
        at = root / source
        for number, words in enumerate(formats):
            target = root / f"{name.replace(' > ', '-').replace(' ', '-')}-{number}"
            crosses = not (source.startswith("zero") and number == 0)  # a native checkpoint says all of itself
            convert(conversion(at, target, words, likes[source] if crosses else None), RunOptions(reread=True))
            at = target
        run = {"name": name, "steps": STEPS, "load": str(at)}
        if formats[-1].startswith("dcp"):
            fsdp = {"sharded": False} if name.endswith("plain torch") else {"dp": 3}
            torchs.append({**run, **fsdp, "model": "deepspeed", "first": SAVED})
        else:
            ours.append({**run, **SOURCES.get(source, SOURCES["zero1"]), "topology": formats[-1].split()[1]})
    return launch(ours) | dcp_run.launch(torchs)


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(name, uninterrupted, resumed):
    source = CHAINS[name][0]
    assert resumed[name] == pytest.approx(uninterrupted[source], abs=TOLERANCE.get(source, 1e-6), rel=0)


def test_the_runs_differ_from_each_other(uninterrupted):
    """Else the tensors of what --like names would do."""
    assert abs(uninterrupted["torch"][0] - uninterrupted["zero1"][0]) > 1e-3
    assert abs(uninterrupted["bf16"][0] - uninterrupted["zero1"][0]) > 1e-5
