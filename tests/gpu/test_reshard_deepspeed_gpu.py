"""Checkpoints that DeepSpeed wrote on a GPU, converted to other ranks and back, on the GPU and on the CPU."""

import functools
from pathlib import Path

import pytest

from reshard.api import reshard
from tests.engine.reshard_run import folder_of, goes_on, launch, launch_all
from tests.gpu.gpu_ranks import run_on_gpu

FP32, BF16 = 1e-5, 5e-3
CASES = {
    **{f"zero-{stage}": {"model": "flat", "topology": f"dp=1,zero={stage}"} for stage in (1, 2, 3)},
    **{f"bf16-{stage}": {"model": "flat", "topology": f"dp=1,zero={stage}", "bf16": True} for stage in (0, 1, 2, 3)},
    "fp16": {"model": "flat", "topology": "dp=1,zero=2", "fp16": True},
    "fused": {"model": "flat", "topology": "dp=1,zero=1", "bf16": True, "configured": "fused"},
    "fused-zero-3": {"model": "flat", "topology": "dp=1,zero=3", "configured": "fused"},
    "experts": {"model": "moe", "topology": "dp=1,zero=2", "bf16": True},
    "autoep": {"model": "autoep", "topology": "dp=1,zero=2"},
    "pipeline": {"model": "pipeline", "topology": "dp=1,zero=1", "bf16": True},
}


def tolerance(case: str) -> float:
    run = CASES[case]
    return BF16 if run.get("bf16") or run.get("fp16") else FP32


def stage(case: str) -> str:
    return CASES[case]["topology"].removeprefix("dp=1,")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Function from a case to its checkpoint after the second step, and to its losses of five steps, on the GPU."""
    root = tmp_path_factory.mktemp("sources")

    @functools.cache
    def train(case: str) -> tuple[Path, list[float]]:
        folder = folder_of(root, case)
        losses = launch(
            [{"name": case, **CASES[case], "steps": 5, "save_at": 2, "save": str(folder)}], start=run_on_gpu
        )
        return root, losses[case]

    return train


@pytest.mark.parametrize("case", CASES)
def test_converted_to_two_ranks_and_back_it_goes_on_with_the_same_losses(case, uninterrupted, tmp_path):
    root, losses = uninterrupted(case)
    source, apart, whole = folder_of(root, case), tmp_path / "dp2" / "step-00000002", folder_of(tmp_path, case)
    reshard(source, apart, f"dp=2,{stage(case)}")
    reshard(apart, whole, f"dp=1,{stage(case)}")
    run = {"name": case, **CASES[case], "steps": 3, "load": str(whole)}
    assert launch([run], start=run_on_gpu)[case] == pytest.approx(losses[2:], abs=tolerance(case), rel=0)


@pytest.mark.parametrize("case", [case for case in CASES if case not in {"pipeline", "autoep", "fused"}])
def test_two_ranks_on_the_gpu_go_on_with_the_same_losses(case, uninterrupted, tmp_path):
    root, losses = uninterrupted(case)
    run = {**CASES[case], "name": case, "topology": f"dp=2,{stage(case)}"}
    resumed = launch([goes_on(root, case, tmp_path, run)], start=run_on_gpu)
    assert resumed[case] == pytest.approx(losses[2:], abs=tolerance(case), rel=0)


@pytest.mark.parametrize("case", ["zero-1", "zero-3", "bf16-2", "fused"])
def test_two_ranks_on_the_cpu_go_on_with_the_same_losses(case, uninterrupted, tmp_path):
    root, losses = uninterrupted(case)
    run = {**CASES[case], "name": case, "topology": f"dp=2,{stage(case)}"}
    resumed = launch_all([goes_on(root, case, tmp_path, run)])
    assert resumed[case] == pytest.approx(losses[2:], abs=max(tolerance(case), 1e-4), rel=0)
