"""Optimizer states in the buckets of Megatron-Core's distributed optimizer (`dp_reshardable`) are found and trained on.

Gradients of the small models are drawn by the name of the weight, so that states do not depend on pp, dp and buckets.
`fully_reshardable` is what Megatron-Core itself makes of one run's states, but only where it has one bucket, or buckets
without padding: with several, 0.16.1 reads the states of one bucket where another one's are.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.topology import Topology
from tests.engine.reshard_run import launch
from tests.engine.test_reshard_megatron_deepspeed import find_names, run_in_deepspeed, run_in_megatron
from tests.randomness import SOAKING

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak_only,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core"),
]

DEEPSPEED, MEGATRON = (Path(__file__).with_name(name) for name in ("family_rank.py", "megatron_rank.py"))
KINDS = ("dp_reshardable", "fully_reshardable")
GPT = {
    "normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True, "add_qkv_bias": True,
    "qk_layernorm": True, "positions": "learned_absolute",
}  # fmt: skip
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 6}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 10}
WHOLE: dict[str, dict] = {
    "dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tied": {"tied": True}, "tp2 tied": {"tp": 2, "tied": True},
    "bf16": {"bf16": True}, "gpt": {"model": GPT}, "gpt tp2": {"tp": 2, "model": GPT},
    "experts": {"model": EXPERTS}, "ep2": {"ep": 2, "model": EXPERTS},
    "gpt ep2": {"ep": 2, "model": {**GPT, **SHARED, "gated_linear_unit": True, "add_bias_linear": False}},
    "biases ep2": {"ep": 2, "model": {**GPT, **EXPERTS}}, "layers4": {"model": {"num_layers": 4}},
    "tied layers4": {"tp": 2, "tied": True, "model": {"num_layers": 4}},
    "vp2": {"pp": 2, "vp": 2, "model": {"num_layers": 4}},
}  # fmt: skip
SPLIT: dict[str, tuple[str, dict]] = {
    "buckets": ("dp2", {"bucket_size": 300}),
    "pp2 tied": ("tied", {"pp": 2, "tied": True}),
    "ep2 buckets": ("ep2", {"ep": 2, "model": EXPERTS, "bucket_size": 300}),
}
SAME_MOMENTS = {"vp2": "layers4", "ep2": "experts"}
"""Runs of one bucket each of the same model."""
if SOAKING:
    WHOLE |= {
        "tp2 experts": {"world": 4, "tp": 2, "etp": 2, "ep": 2, "model": SHARED, "bf16": True},
        "tp2 ep2": {"world": 4, "tp": 2, "etp": 1, "ep": 2, "model": EXPERTS},
        "ep4": {"world": 4, "ep": 4, "model": {**EXPERTS, "num_moe_experts": 8, "moe_layer_freq": [0, 1]}},
        "pp2 vp2 ep2": {
            "world": 4, "pp": 2, "vp": 2, "ep": 2,
            "model": {**SHARED, "num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]},
        },
    }  # fmt: skip
    SPLIT |= {
        "dp3": ("dp2", {"world": 3, "bucket_size": 600}),
        "dp4": ("gpt", {"world": 4, "bucket_size": 600, "model": GPT}),
        "tp2 pp2 tied": ("tp2 tied", {"world": 4, "tp": 2, "pp": 2, "tied": True}),
        "tp2 vp2 tied": (
            "tied layers4",
            {"world": 4, "tp": 2, "pp": 2, "vp": 2, "tied": True, "model": {"num_layers": 4}},
        ),
        "pp2 dp2 tied": ("tied", {"world": 4, "pp": 2, "tied": True, "bucket_size": 300}),
    }
"""States in several buckets, and the run of the same states in one."""


def hold(root: Path, name: str, *, world: int = 2, tp: int = 1, pp: int = 1, **more) -> dict:
    stages = {"pipeline_model_parallel_size": pp} if pp > 1 else {}
    stages |= {"virtual_pipeline_model_parallel_size": more["vp"]} if "vp" in more else {}
    stages |= {"expert_model_parallel_size": more["ep"]} if "ep" in more else {}
    stages |= {"expert_tensor_parallel_size": more["etp"]} if "etp" in more else {}
    return {
        "name": name, "kind": "states", "tp": tp, "pp": pp,
        "topology": f"tp={tp},pp={pp},dp={world // tp // pp}",
        "save": {kind: str(root / name / kind) for kind in KINDS},
        **more, "model": {**more.get("model", {}), **stages},
    }  # fmt: skip


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> Path:
    """Checkpoints of all runs, each in both kinds."""
    root = tmp_path_factory.mktemp("states")
    every = {**WHOLE, **{name: case for name, (_, case) in SPLIT.items()}}
    for world in sorted({case.get("world", 2) for case in every.values()}):
        launch([hold(root, name, **case) for name, case in every.items() if case.get("world", 2) == world], MEGATRON)
    return root


def read(folder: Path) -> dict[str, str]:
    return dict(read_digests(read_checkpoint(folder, None)))


@pytest.mark.parametrize("name", WHOLE)
def test_states_are_what_megatron_core_itself_finds_in_its_buckets(name, states):
    found = read(states / name / "dp_reshardable")
    assert len(found) > 50
    assert found == read(states / name / "fully_reshardable")


def test_one_expert_on_each_rank_is_converted_where_args_say_that_it_is_not_grouped(tmp_path):
    """The files alone do not show whether the expert is transposed in the buckets."""
    run = hold(tmp_path, "one", ep=2, model={**EXPERTS, "num_moe_experts": 2})
    launch([run], MEGATRON)
    source, truth = (tmp_path / "one" / kind for kind in KINDS)
    assert not [key for key in read(source) if not key.startswith("weight/")]
    torch = pytest.importorskip("torch")
    common = torch.load(source / "common.pt", weights_only=False)
    torch.save({**common, "args": argparse.Namespace(moe_grouped_gemm=False)}, source / "common.pt")
    assert read(source) == read(truth)
    go(source, tmp_path / "out", "dp=1", "megatron")
    assert read(tmp_path / "out") == read(truth)


@pytest.mark.parametrize("name", SPLIT)
def test_states_in_several_buckets_are_those_of_a_run_with_one(name, states):
    found, wanted = read(states / name / "dp_reshardable"), read(states / SPLIT[name][0] / "dp_reshardable")
    moments = [key for key in wanted if key.startswith("exp_avg")]
    assert {key: found[key] for key in moments} == {key: wanted[key] for key in moments}
    assert {key[5:]: value for key, value in found.items() if key.startswith("fp32/")} == {
        key[7:]: value for key, value in found.items() if key.startswith("weight/")
    }


@pytest.mark.parametrize("name", SAME_MOMENTS)
def test_states_do_not_depend_on_the_ranks_of_experts_and_on_virtual_stages(name, states):
    found, wanted = (read(states / each / "dp_reshardable") for each in (name, SAME_MOMENTS[name]))
    moments = [key for key in wanted if key.startswith("exp_avg")]
    assert {key: found[key] for key in moments} == {key: wanted[key] for key in moments}


@pytest.mark.parametrize("name", SPLIT)
def test_megatron_core_itself_mixes_up_states_of_several_buckets(name, states):
    """It is why such a folder should be saved as `dp_reshardable`: if this fails, Megatron-Core was mended."""
    assert read(states / name / "dp_reshardable") != read(states / name / "fully_reshardable")


KINDS_OF_RUNS: dict[str, dict] = {
    "ep2": {
        "ep": 2,
        "model": {**EXPERTS, "moe_ffn_hidden_size": 24, "expert_model_parallel_size": 2},
    },
    "layers4": {"model": {"num_layers": 4}},
    "vp2": {
        "pp": 2, "vp": 2, "topology": "pp=2",
        "model": {
            "num_layers": 4, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": True, "batch_p2p_comm": False,  # with two stages, both neighbours are one rank
        },
    },
}  # fmt: skip
"""Runs besides those of `test_reshard_megatron_deepspeed`."""
RUNS: dict[str, tuple[str, dict]] = {
    "dp2": ("dp2", {}),
    "tp2": ("tp2", {}),
    "buckets": ("dp2", {"bucket_size": 3000}),
    "bf16": ("bf16", {}),
    "ep2": ("ep2", {}),
    "vp2": ("vp2", {}),
}
TO_MEGATRON = {
    "dp2": "dp2", "dp2 to tp2": "tp2", "tp2": "tp2", "tp2 to dp2": "dp2", "buckets": "dp2", "bf16": "bf16",
    "ep2": "ep2", "vp2": "vp2", "vp2 to dp2": "layers4",
}  # fmt: skip
TO_DEEPSPEED = {"dp2": "zero1", "tp2": "zero3", "buckets": "zero1", "bf16": "bf16"}
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


def train(name: str, kind: str, **more) -> dict:
    own = KINDS_OF_RUNS.get(kind, {})
    return run_in_megatron(name, "dp2" if own else kind, **own, **more)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, list[float]]:
    """Losses of runs that save in buckets, and of those that go on from them."""
    root = tmp_path_factory.mktemp("runs")
    whole = {"steps": 4, "save_at": 2, "sharding": "dp_reshardable"}
    losses = launch(
        [train(name, kind, **whole, **case, save=str(root / name)) for name, (kind, case) in RUNS.items()],
        MEGATRON,
    )
    runs = []
    for case, kind in TO_MEGATRON.items():
        target = root / f"{case}, megatron"
        run = train(f"to megatron {case}", kind, steps=2, load=str(target))
        go(root / case.split()[0], target, run["topology"], "megatron")
        runs.append(run)
    through = root / "dcp"
    go(root / "tp2", through, "dp=3", "dcp")
    go(through, root / "back", "dp=2", "megatron", like=root / "dp2")
    runs.append(run_in_megatron("to megatron through dcp", "dp2", steps=2, load=str(root / "back")))
    losses |= launch(runs, MEGATRON)
    if find_spec("deepspeed") is None or find_spec("transformers") is None:
        return losses
    likes = {kind: root / "like" / kind / "step-1" for kind in set(TO_DEEPSPEED.values())}
    launch([run_in_deepspeed(kind, kind, steps=1, save_at=1, seed=5, save=str(path)) for kind, path in likes.items()],
           DEEPSPEED)  # fmt: skip
    names = find_names(root, "megatron-llama.yaml")
    runs = []
    for case, kind in TO_DEEPSPEED.items():
        target = root / case.replace(" ", "-") / "to" / "step-2"
        run = run_in_deepspeed(f"to deepspeed {case}", kind, steps=2, load=str(target))
        go(root / case, target, run["topology"], "deepspeed", like=likes[kind], names=names)
        runs.append(run)
    return losses | launch(runs, DEEPSPEED)


def go(source: Path, target: Path, topology: str, target_format: str, **more) -> None:
    wanted = Conversion(
        source=source, target=target, topology=Topology.parse(topology), target_format=target_format, **more
    )
    report = convert(wanted, RunOptions(reread=True))
    assert report.verified
    assert report.witness["not_witnessed"] == 0


@pytest.mark.parametrize("case", TO_MEGATRON)
def test_megatron_core_goes_on_with_its_losses(case, resumed):
    kind = case.split()[0]
    tolerance = TOLERANCE["bf16" if kind == "bf16" else "fp32"]
    assert resumed[f"to megatron {case}"] == pytest.approx(resumed[kind][2:], abs=tolerance, rel=0)


def test_megatron_core_goes_on_after_a_way_through_dcp(resumed):
    assert resumed["to megatron through dcp"] == pytest.approx(resumed["tp2"][2:], abs=TOLERANCE["fp32"], rel=0)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup")
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("case", TO_DEEPSPEED)
def test_deepspeed_goes_on_with_the_losses_of_megatron_core(case, resumed):
    tolerance = TOLERANCE["bf16" if case == "bf16" else "fp32"]
    assert resumed[f"to deepspeed {case}"] == pytest.approx(resumed[case][2:], abs=tolerance, rel=0)
