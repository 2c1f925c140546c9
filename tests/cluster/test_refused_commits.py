"""A job whose commits hold a class that no framework writes loses nodes, and never begins from nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reshard.formats.pt.objects import Global, Inert
from tests.cluster.jobs import LIGHT, Run, resumed, victim
from tests.golden.files import edit

pytestmark = pytest.mark.cluster

GOLDEN = Path("tests/golden/deepspeed-0.19.8/zero2-dp3/step-00000002")


@pytest.mark.soak_only  # the model of the cluster has such commits
def test_a_commit_with_a_foreign_class_is_loaded_in_its_own_topology_or_converted_once_it_is_allowed(
    run: Run, checkpoints: Path
) -> None:
    given = shutil.copytree(GOLDEN, checkpoints / "given")
    foreign = Inert("reduce", Global("mine", "Progress"), (1,))
    edit(given, "mp_rank_00_model_states.pt", lambda value: value.update(trainer=foreign))
    run.submit(
        [*LIGHT, "1000000", "10", "0", "/checkpoint/given", "carry"],
        accelerator={"resource": "amd.com/gpu", "perNode": [1]},
        parallelism={"zeroStage": 2},
        nodes={"min": 1, "max": 3},
        batch={"globalSamples": 12, "microSamples": 2},
        recovery={"scaleUpStableSeconds": 600},
    )
    run.until("two commits", lambda status: len(status.get("checkpoint", {}).get("history", [])) >= 2)
    lost = victim(run)
    run.cluster.kill_node(lost)
    waiting = run.until("a wait for the topology", lambda status: status.get("reason") == "ReshardFailed", 180)
    assert waiting["phase"] == "Waiting"
    newest = waiting["checkpoint"]
    assert "mine.Progress" in run.condition("ReshardFailed")["message"]
    run.cluster.heal_node(lost)
    kept = run.until("an attempt in the same topology", resumed(1), 180)
    assert (kept["current"]["resume"]["uri"], kept["current"]["resume"]["mode"]) == (newest["uri"], "AsIs")

    run.patch(checkpoint={"allowedGlobals": ["mine.Progress"]})
    run.cluster.kill_node(victim(run))
    converted = run.until("a converted attempt", resumed(kept["attempt"]), 180)
    resume = converted["current"]["resume"]
    assert (resume["mode"], converted["replicas"], resume["step"] >= newest["step"]) == ("Reshard", 2, True)
    assert not any(item.get("invalid") for item in converted["checkpoint"]["history"]), json.dumps(converted, indent=1)
    starts = run.cluster.get("events", "-n", run.namespace)["items"]
    assert [item["message"][:9] for item in starts if item["reason"] == "StartsFromNothing"] == ["attempt 1"]
