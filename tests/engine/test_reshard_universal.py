"""Universal checkpoints that unmodified DeepSpeed loads in other layouts and stages, to go on as if nothing happened.

Two steps, save natively, convert to one universal folder, load it, three more steps: the losses must be those of the
run that was never interrupted.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.formats import read_checkpoint
from reshard.topology import Topology
from tests.engine.reshard_run import folder_of, launch_all, save_all
from tests.golden.files import STEP, assemble, cut, golden, whole
from tests.randomness import some

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

TOLERANCE = 1e-6
RANK = Path(__file__).with_name("universal_rank.py")
ONE = {"model": "flat", "one_group": True}
TWO = {"model": "flat"}
SOURCES = {
    "one/zero=1": {**ONE, "topology": "dp=2,zero=1"},
    "one/zero=3": {**ONE, "topology": "dp=2,zero=3"},
    "one/zero=0": {**ONE, "topology": "dp=2,zero=0"},
    "two/zero=2": {**TWO, "topology": "dp=2,zero=2"},
    "two/zero=3": {**TWO, "topology": "dp=2,zero=3"},
    "sgd": {**TWO, "topology": "dp=2,zero=1", "optimizer": "sgd"},
    "bf16": {**TWO, "topology": "dp=2,zero=1", "bf16": True},
    "pipeline": {"model": "pipeline", "topology": "tp=2,pp=2,dp=1,zero=1"},
}
STAGES = ("dp=3,zero=1", "dp=3,zero=2", "dp=3,zero=3")
TARGETS = {
    "one/zero=1": STAGES,
    "one/zero=3": STAGES,
    "one/zero=0": STAGES[2:],
    "two/zero=2": STAGES[:2],
    "two/zero=3": STAGES[:1],
    "sgd": STAGES[:1],
    "bf16": STAGES[1:2],
    "pipeline": ("dp=2", "pp=2", "tp=2"),
}
PAIRS = some([(source, target) for source, found in TARGETS.items() for target in found], every=2)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    """Five steps of every source, saved after the second."""
    root = tmp_path_factory.mktemp("sources")
    return root, save_all(root, SOURCES, RANK)


def universal(source: Path, target: Path, topology: str = "dp=1,zero=1") -> Path:
    wanted = Conversion(source=source, target=target, topology=Topology.parse(topology), target_format="universal")
    convert(wanted, RunOptions(reread=True, sync=False))
    return target


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    """Three more steps of every target: all of a source's targets load the same folder."""
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("universal")
    folders = {name: universal(folder_of(root, name), folder_of(out, name)) for name in TARGETS}
    runs = [
        {
            "name": f"{source} -> {target}",
            **SOURCES[source],
            "topology": target,
            "steps": 3,
            "load": str(folders[source]),
        }
        for source, target in PAIRS
    ]
    wrong = {**TWO, "topology": "dp=3,zero=3", "steps": 3, "load": str(folders["two/zero=2"])}
    runs.append({"name": "stage 3, two groups", **wrong})
    runs.append({"name": "stage 3, two groups, steps cloned", **wrong, "clone_steps": True})
    robin = {**wrong, "topology": "dp=3,zero=2", "zero": {"round_robin_gradients": True}}
    runs.append({"name": "round robin", **robin})
    return launch_all(runs, RANK)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{source} -> {target}" for source, target in PAIRS])
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(source, target, uninterrupted, resumed):
    tolerance = 5e-4 if source == "bf16" else TOLERANCE
    assert resumed[f"{source} -> {target}"] == pytest.approx(uninterrupted[1][source][2:], abs=tolerance, rel=0)


def test_deepspeeds_stage_3_shares_one_step_among_groups(uninterrupted, resumed):
    """Why stage 3 is refused for several groups. Their settings come through: DeepSpeed gives all those of group 0."""
    expected = uninterrupted[1]["two/zero=2"][2:]
    found = resumed["stage 3, two groups"]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) > 100 * TOLERANCE
    assert resumed["stage 3, two groups, steps cloned"] == pytest.approx(expected, abs=TOLERANCE, rel=0)


def test_round_robin_gradients_load_other_values(uninterrupted, resumed):
    """Why there is a note about them."""
    expected = uninterrupted[1]["two/zero=2"][2:]
    assert max(abs(a - b) for a, b in zip(resumed["round robin"], expected, strict=True)) > 100 * TOLERANCE


def told_tasks(root: Path, name: str, tp: int) -> Iterator[tuple[dict, dict[str, str]]]:
    """Yield tasks that load a golden checkpoint's conversion, with the digests that the model's own cut has."""
    tensors = assemble(read_checkpoint(golden(name), None))
    folder = universal(golden(name), root / f"{name}-{tp}" / STEP, f"tp={tp},zero=1")
    names = [key.removeprefix("fp32/") for key in tensors if key.startswith("fp32/") and "#" not in key]
    for parameter, rank in itertools.product(names, range(tp)):
        local = {
            state: np.ascontiguousarray(cut(parameter, whole(tensors, f"{state}/{parameter}"), tp, rank))
            for state in ("fp32", "exp_avg", "exp_avg_sq")
        }
        task = {"folder": str(folder), "name": parameter, "shape": local["fp32"].shape, "rank": rank, "tp": tp}
        yield task, {state: hashlib.sha256(value.tobytes()).hexdigest() for state, value in local.items()}


def untold_tasks(root: Path) -> list[dict]:
    """A weight of which nobody said how it is cut: rows and columns for a second rank, all of it for the only one."""
    folder = universal(golden("zero2-dp3"), root / "untold" / STEP)
    task = {"folder": str(folder), "name": "down.weight", "rank": 1}
    return [
        {**task, "tp": 7, "shape": (1, 3)},
        {**task, "tp": 3, "shape": (7, 1)},
        {**task, "tp": 1, "shape": (7, 3), "rank": 0},
    ]


def test_deepspeed_cuts_every_parameter_as_the_model_does(tmp_path):
    """Fused heads of different numbers, gate and up in one, rows, columns, vocabulary with all its padding rows.

    What is not said fails instead. DeepSpeed's own converter has row-parallel weights cut along dim 0: the sizes agree,
    and nothing is noticed.
    """
    cases = [("pipeline-dp2", 2), ("pipeline-tp2-pp2", 1), ("pipeline-tp2-pp2", 2)]
    told = [pair for name, tp in cases for pair in told_tasks(tmp_path, name, tp)]
    tasks = [*(task for task, _ in told), *untold_tasks(tmp_path)]
    script = Path(__file__).with_name("universal_atoms.py")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), json.dumps(tasks)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    *found, rows, columns, one_rank = json.loads(done.stdout.splitlines()[-1])
    for (task, expected), own in zip(told, found, strict=True):
        assert own == expected, task
    assert "IndexError" in rows
    assert "IndexError" in columns
    assert set(one_rank) == {"fp32", "exp_avg", "exp_avg_sq"}
