"""A GPT with Megatron-DeepSpeed's names, splits and descriptions, into other tp, pp and dp.

Megatron-DeepSpeed itself is not run: `megatron_gpt` is a model of ours that DeepSpeed's pipeline engine trains.
"""

import itertools
import shutil
import types
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, plan_conversion
from reshard.errors import CorruptSourceError
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.topology import Topology
from tests.engine.reshard_run import launch

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak_only,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

SCRIPT = Path(__file__).with_name("megatron_gpt_rank.py")
STEP = "step-00000002"
WORDS, POSITIONS = (f"tied_modules.embed.{name}_embeddings.weight" for name in ("word", "position"))
SOURCES: dict[str, dict] = {
    "gpt": {"topology": "tp=2,pp=2,dp=2,zero=1"},
    "gpt-tp1": {"topology": "tp=1,pp=2,dp=1,zero=1"},
    "bf16": {"topology": "tp=2,pp=2,dp=1,zero=1", "bf16": True},
    "llama": {"topology": "tp=2,pp=2,dp=1,zero=1", "swiglu": True, "untied": True},
}
TARGETS = [
    ("gpt", "tp=1,pp=2,dp=1,zero=1", ""), ("gpt", "tp=2,pp=1,dp=2,zero=1", ""), ("gpt", "tp=1,pp=4,dp=1,zero=1", ""),
    ("gpt", "tp=2,pp=2,dp=1,zero=1", ""), ("gpt", "tp=1,pp=1,dp=2,zero=1", "universal"),
    ("gpt", "tp=2,pp=2,dp=1,zero=1", "deepspeed's universal"),
    ("gpt-tp1", "tp=2,pp=1,dp=1,zero=1", ""), ("gpt-tp1", "tp=2,pp=2,dp=1,zero=1", ""),
    ("bf16", "tp=1,pp=1,dp=2,zero=1", ""),
    ("llama", "tp=1,pp=1,dp=2,zero=1", ""), ("llama", "tp=1,pp=4,dp=1,zero=1", ""),
    ("llama", "tp=2,pp=1,dp=1,zero=1", "universal"),
]  # fmt: skip
TOLERANCE, BF16_TOLERANCE = 1e-5, 5e-3


def launch_all(runs: list[dict]) -> dict[str, list[float]]:
    """One set of processes per topology: a pipeline leaves its grid of ranks behind."""
    losses: dict[str, list[float]] = {}
    for _, group in itertools.groupby(sorted(runs, key=lambda run: run["topology"]), key=lambda run: run["topology"]):
        losses |= launch(list(group), SCRIPT)
    return losses


def deepspeeds_own(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    options = types.SimpleNamespace(
        input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=False,
    )  # fmt: skip
    ds_to_universal.main(options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    runs = [
        {"name": name, **run, "steps": 4, "save_at": 2, "save": str(root / name / STEP)}
        for name, run in SOURCES.items()
    ]
    return root, launch_all(runs)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    runs = []
    for source, target, form in TARGETS:
        name = f"{source} to {target} {form}"
        folder = out / name / STEP
        if form.startswith("deepspeed"):
            deepspeeds_own(root / source / STEP, folder)
        else:
            wanted = Conversion(
                source=root / source / STEP, target=folder, topology=Topology.parse(target), target_format=form
            )
            convert(wanted, RunOptions(reread=True))
        own = {key: value for key, value in SOURCES[source].items() if key != "topology"}
        runs.append({"name": name, **own, "topology": target, "steps": 2, "load": str(folder), "universal": bool(form)})
    return launch_all(runs)


@pytest.mark.parametrize(("source", "target", "form"), TARGETS)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(source, target, form, uninterrupted, resumed):
    tolerance = BF16_TOLERANCE if SOURCES[source].get("bf16") else TOLERANCE
    expected = uninterrupted[1][source][2:]
    assert resumed[f"{source} to {target} {form}"] == pytest.approx(expected, abs=tolerance, rel=0)


def test_degrees_do_not_change_what_is_trained(uninterrupted):
    losses = uninterrupted[1]
    assert losses["gpt-tp1"] == pytest.approx(losses["gpt"], abs=TOLERANCE, rel=0)


def test_universal_checkpoint_is_that_of_deepspeed(uninterrupted, tmp_path):
    """All states of all parameters have the same digests, also the positions, which differ between the stages."""
    source = uninterrupted[0] / "gpt" / STEP
    deepspeeds_own(source, tmp_path / "own" / STEP)
    wanted = Conversion(
        source=source, target=tmp_path / STEP, topology=Topology.parse("tp=2,zero=1"), target_format="universal"
    )
    convert(wanted)
    own, ours = (read_digests(read_checkpoint(folder, None)) for folder in (tmp_path / "own" / STEP, tmp_path / STEP))
    common = {key for key in own if "#padding" not in key}
    assert {key: ours.get(key) for key in common} == {key: own[key] for key in common}
    assert len(common) > 150


def test_first_stage_alone_uses_the_positions_and_a_note_says_so(uninterrupted, tmp_path):
    source = uninterrupted[0] / "gpt" / STEP
    first, last = (read_masters(source, mp, POSITIONS)[1] for mp in (0, 2))
    assert first.shape == last.shape
    assert not (first == last).all()
    wanted = Conversion(source=source, target=tmp_path / STEP, topology=Topology.parse("tp=1,pp=2,zero=1"))
    (note,) = [note for note in plan_conversion(wanted).layout.notes if POSITIONS in note]
    assert "first stage's copy is taken" in note


def test_words_of_the_stages_must_still_be_equal(uninterrupted, tmp_path):
    """They are tied, and a copy that differs is damage: what DeepSpeed's own converter does not notice."""
    folder = tmp_path / STEP
    shutil.copytree(uninterrupted[0] / "gpt" / STEP, folder)
    state, words = read_masters(folder, 2, WORDS)
    words[0] += 1
    torch.save(state, folder / "zero_pp_rank_0_mp_rank_02_optim_states.pt")
    wanted = Conversion(source=folder, target=tmp_path / "out" / STEP, topology=Topology.parse("tp=1,pp=2,zero=1"))
    with pytest.raises(CorruptSourceError, match=r"copies of one tensor differ"):
        convert(wanted)


def read_masters(folder: Path, mp: int, name: str):
    """Return the optimizer's file of a model-parallel rank, and the first rank's part of a parameter's masters."""
    state = torch.load(folder / f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt", weights_only=False)
    shapes = torch.load(folder / f"mp_rank_{mp:02d}_model_states.pt", weights_only=False)["param_shapes"][0]
    before = itertools.takewhile(lambda item: item[0] != name, shapes.items())
    start = sum(shape.numel() for _, shape in before)
    flat = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data
    return state, flat[start : start + shapes[name].numel()]
