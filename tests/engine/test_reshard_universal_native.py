"""From a universal folder alone back to native checkpoints, with real DeepSpeed at both ends and in the middle.

Two steps, save, `ds_to_universal` (or `reshard run --format universal`), then native files for another layout or stage
with nothing but that folder at hand; unmodified `engine.load_checkpoint`, three more steps. The losses must be those
of the run that was never interrupted.
"""

import contextlib
import io
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology
from tests.engine.reshard_run import folder_of, launch_all, save_all
from tests.golden.make_universal import tuples_of_parts
from tests.randomness import some

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

FLAT = {"model": "flat"}
BF16 = {**FLAT, "bf16": True}
SOURCES = {
    "zero=1": {**FLAT, "topology": "dp=2,zero=1"},
    "zero=3": {**FLAT, "topology": "dp=2,zero=3", "zero": {"sub_group_size": 900}},
    "sgd": {**FLAT, "topology": "dp=2,zero=1", "optimizer": "sgd"},
    "frozen": {**FLAT, "topology": "dp=2,zero=2", "frozen": ["up.bias", "norm.weight"]},
    "frozen-zero3": {**FLAT, "topology": "dp=2,zero=3", "frozen": ["up.bias", "down.weight"]},
    "bf16": {**BF16, "topology": "dp=2,zero=2"},
    "bf16-optimizer": {**BF16, "topology": "dp=2,zero=1", "data_types": {"grad_accum_dtype": "fp32"}},
    "pipeline": {"model": "pipeline", "topology": "tp=2,pp=2,dp=1,zero=1"},
}
STAGES = ("dp=3,zero=0", "dp=3,zero=1", "dp=3,zero=2", "dp=3,zero=3")
TARGETS = {
    ("theirs", "zero=1"): STAGES,
    ("theirs", "zero=3"): STAGES,
    ("ours", "sgd"): ("dp=3,zero=1",),  # DeepSpeed's converter fails with SGD: KeyError
    ("ours", "frozen"): ("dp=3,zero=2", "dp=3,zero=3"),
    ("theirs", "frozen"): ("dp=3,zero=2",),
    ("theirs", "frozen-zero3"): ("dp=3,zero=1", "dp=3,zero=3"),
    ("theirs", "bf16"): ("dp=3,zero=0", "dp=3,zero=2", "dp=3,zero=3"),
    ("ours", "bf16-optimizer"): ("dp=3,zero=1", "dp=3,zero=2"),
    ("theirs", "pipeline"): ("dp=2,zero=1", "pp=2,dp=2,zero=1", "tp=2,dp=2,zero=1"),
    ("ours", "pipeline"): ("dp=2,zero=1", "tp=2,dp=2,zero=1"),
}
CASES = some([(*made, target) for made, targets in TARGETS.items() for target in targets], every=3)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    """Five steps of every source, saved after the second."""
    root = tmp_path_factory.mktemp("sources")
    return root, save_all(root, {name: SOURCES[name] for _, name, _ in CASES})


def theirs(source: Path, target: Path) -> Path:
    """Convert a native checkpoint with DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal

    tuples_of_parts(source)
    options = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    target.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()):
        ds_to_universal.main(options)
    return target


def ours(source: Path, target: Path) -> Path:
    convert(
        Conversion(source=source, target=target, topology=Topology(zero=1), target_format="universal"),
        RunOptions(sync=False),
    )
    return target


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    """Three more steps of every target; nothing but the universal folder is left of the source."""
    root, _ = uninterrupted
    universal, native = tmp_path_factory.mktemp("universal"), tmp_path_factory.mktemp("native")
    make = {"theirs": theirs, "ours": ours}
    folders = {
        (maker, name): make[maker](folder_of(root, name), folder_of(universal, f"{maker}-{name}"))
        for maker, name in dict.fromkeys((maker, name) for maker, name, _ in CASES)
    }
    root.rename(root.with_name("gone"))
    runs = []
    for maker, name, target in CASES:
        folder = folder_of(native, f"{maker}-{name}-{target}")
        wanted = Conversion(
            source=folders[maker, name], target=folder, topology=Topology.parse(target), target_format="deepspeed"
        )
        convert(wanted, RunOptions(reread=True, sync=False))
        case = {**SOURCES[name], "topology": target, "steps": 3, "load": str(folder)}
        runs.append({**case, "name": f"{maker} {name} -> {target}"})
    return launch_all(runs)


@pytest.mark.parametrize(("maker", "name", "target"), CASES)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(maker, name, target, uninterrupted, resumed):
    tolerance = 5e-4 if "bf16" in name else 1e-6
    expected = uninterrupted[1][name][2:]
    assert resumed[f"{maker} {name} -> {target}"] == pytest.approx(expected, abs=tolerance, rel=0)
