"""FSDP2 and tensor parallelism made elastic: killed, and resumed by DCP at other degrees without a reshard."""

import json

import pytest

from elastic_trainer.retention import find_commits
from elastic_trainer.stacks.rank_files import FOLDER
from reshard.api import reshard
from reshard.commits.commit import check_files, read_commit
from reshard.contract import LeaseKey
from reshard.topology import Topology
from tests.engine.stack_run import Pods, newest_commit
from tests.engine.test_stacks_deepspeed import BF16, FP32, SAME, STEPS, kill_a_rank, make_folder, train
from tests.randomness import some

pytestmark = pytest.mark.engine

SCRIPT = "fsdp2/elastic.py"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """Losses of a run that nothing disturbs."""
    losses = train(tmp_path_factory.mktemp("quiet"), "dp=2,zero=3", script=SCRIPT)
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Newest commit of a run of which a rank was killed."""
    return kill_a_rank(tmp_path_factory.mktemp("killed"), "dp=2,zero=3", script=SCRIPT)


@pytest.mark.parametrize("topology", [pytest.param("dp=1,zero=3", marks=pytest.mark.soak_only), "dp=2,tp=2,zero=3"])
def test_it_goes_on_at_another_topology_with_the_same_losses(quiet, killed, tmp_path, topology):
    commit = read_commit(killed)
    assert (commit.format, commit.topology) == ("dcp", Topology(dp=2, zero=3))
    losses = train(tmp_path, topology, script=SCRIPT, ETJ_ATTEMPT="2", ETJ_RESUME=str(killed))
    expected = {number: quiet[number] for number in range(commit.step + 1, STEPS + 1)}
    assert losses == pytest.approx(expected, **FP32)
    assert read_commit(newest_commit(tmp_path)).topology == Topology.parse(topology)


@pytest.mark.soak_only
def test_it_goes_on_from_a_commit_that_was_resharded_first(quiet, killed, tmp_path):
    folder = tmp_path / "a2" / killed.name
    reshard(killed, folder, "dp=3")
    assert (killed / FOLDER).exists()
    assert not (folder / FOLDER).exists()
    losses = train(tmp_path, "dp=3,zero=3", script=SCRIPT, ETJ_ATTEMPT="2", ETJ_RESUME=str(folder))
    step = read_commit(killed).step
    assert losses == pytest.approx({number: quiet[number] for number in range(step + 1, STEPS + 1)}, **FP32)


@pytest.mark.soak_only
def test_it_shrinks_from_tensor_parallelism(quiet, tmp_path):
    commit = kill_a_rank(tmp_path, "dp=1,tp=2,zero=3", script=SCRIPT)
    step = read_commit(commit).step
    losses = train(tmp_path, "dp=1,zero=3", script=SCRIPT, ETJ_ATTEMPT="2", ETJ_RESUME=str(commit))
    assert losses == pytest.approx({number: quiet[number] for number in range(step + 1, STEPS + 1)}, **FP32)


@pytest.mark.soak_only
def test_bf16_goes_on_at_another_topology_with_the_same_losses(tmp_path):
    quiet = train(make_folder(tmp_path / "quiet"), "dp=2,zero=3", "--bf16", script=SCRIPT)
    commit = kill_a_rank(make_folder(tmp_path / "killed"), "dp=2,zero=3", "--bf16", script=SCRIPT)
    resume = {"ETJ_ATTEMPT": "2", "ETJ_RESUME": str(commit)}
    losses = train(tmp_path, "dp=1,tp=2,zero=3", "--bf16", script=SCRIPT, **resume)
    expected = {number: quiet[number] for number in range(read_commit(commit).step + 1, STEPS + 1)}
    assert losses == pytest.approx(expected, **BF16)


@pytest.mark.soak_only
def test_dropout_goes_on_as_if_nothing_had_happened_at_the_same_topology(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    dropout = ("--dropout", "0.2", "--save-every", "3")
    quiet = train(first, "dp=2", *dropout, script=SCRIPT)
    resume = {"ETJ_ATTEMPT": "2", "ETJ_RESUME": str(first / "a1" / "step-00000003")}
    losses = train(second, "dp=2", *dropout, script=SCRIPT, **resume)
    assert losses == pytest.approx({step: quiet[step] for step in (4, 5, 6)}, **SAME)


def test_asynchronous_saves_hold_the_state_of_their_step_and_load_at_another_topology(quiet, tmp_path):
    """Every step saves; DCP writes in the background while the next steps change the tensors."""
    first, second = make_folder(tmp_path / "first"), make_folder(tmp_path / "second")
    staging = make_folder(tmp_path / "node")
    box, every_step = tmp_path / "mailbox.json", ("--steps", str(STEPS), "--save-every", "1")
    extra = {
        "ETJ_ASYNC_SAVES": "true",
        "ETJ_STAGING": str(staging),
        "ETJ_STAGING_BYTES": str(1 << 30),
        "ETJ_MAILBOX": str(box),
    }
    with Pods(SCRIPT, first, "dp=2,zero=3", *every_step, folder=tmp_path, **extra) as pods:
        assert pods.finish() == pytest.approx(quiet, **SAME)
    assert "asynchronous" in json.loads(box.read_text())[LeaseKey.SAVE]
    for attempt, (_, step, folder) in enumerate(some(sorted(find_commits(first)), every=3), 2):
        check_files(folder, read_commit(folder), crc=True)
        if step == STEPS:
            continue
        resume = {"ETJ_ATTEMPT": str(attempt), "ETJ_RESUME": str(folder)}
        losses = train(second, "dp=1,tp=2,zero=3", script=SCRIPT, **resume)
        assert losses == pytest.approx({number: quiet[number] for number in range(step + 1, STEPS + 1)}, **FP32)
    assert list(staging.glob("*/*")) == []
