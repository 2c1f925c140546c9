"""A DeepSpeed loop made elastic: killed, resharded to another topology and resumed, with the losses of a quiet run."""

import pytest

from elastic_trainer.stacks.rank_files import FOLDER
from reshard.api import reshard
from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.topology import Topology
from tests.engine.stack_run import Pods, newest_commit

pytestmark = pytest.mark.engine

SCRIPT = "deepspeed_loop/elastic.py"
STEPS = 6
FP32 = {"rel": 1e-4, "abs": 0}
BF16 = {"rel": 5e-3, "abs": 0}
SAME = {"rel": 2e-7, "abs": 0}


def train(root, topology, *args, script=SCRIPT, **extra):
    with Pods(script, root, topology, "--steps", str(STEPS), *args, folder=root, **extra) as pods:
        return pods.finish()


def kill_a_rank(root, topology, *args, script=SCRIPT):
    """Train until step 3, and kill the last rank; return the newest commit."""
    arguments = ("--steps", "100000", "--save-every", "2", *args)
    with Pods(script, root, topology, *arguments, folder=root) as pods:
        pods.wait_for_step(3)
        ranks = pods.ranks()
        ranks[max(ranks)].kill()
        assert pods.wait() == [128 + 9], pods.text[-3000:]
    return newest_commit(root)


def make_folder(path):
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """Losses of a run that nothing disturbs."""
    losses = train(tmp_path_factory.mktemp("quiet"), "dp=2,zero=2")
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Newest commit of a run of which a rank was killed."""
    return kill_a_rank(tmp_path_factory.mktemp("killed"), "dp=2,zero=2")


@pytest.mark.parametrize(
    ("topology", "mode"),
    [("dp=1,zero=1", "virtual"), pytest.param("dp=3,zero=3", "materialize", marks=pytest.mark.soak_only)],
)
def test_it_goes_on_at_another_topology_with_the_same_losses(quiet, killed, tmp_path, topology, mode):
    step = read_commit(killed).step
    folder = tmp_path / "a2" / killed.name
    assert main(["run", str(killed), str(folder), "--to", topology, "--mode", mode, "--quiet"]) == 0
    assert (killed / FOLDER).exists()
    assert not (folder / FOLDER).exists()
    losses = train(tmp_path, topology, ETJ_ATTEMPT="2", ETJ_RESUME=str(folder))
    assert losses == pytest.approx({number: quiet[number] for number in range(step + 1, STEPS + 1)}, **FP32)
    assert read_commit(newest_commit(tmp_path)).topology == Topology.parse(topology)


@pytest.mark.soak_only
def test_bf16_goes_on_at_another_topology_with_the_same_losses(tmp_path):
    quiet = train(make_folder(tmp_path / "quiet"), "dp=2,zero=1", "--bf16")
    killed = kill_a_rank(make_folder(tmp_path / "killed"), "dp=2,zero=1", "--bf16")
    folder = tmp_path / "a2" / killed.name
    reshard(killed, folder, "dp=1,zero=1")
    losses = train(tmp_path, "dp=1,zero=1", "--bf16", ETJ_ATTEMPT="2", ETJ_RESUME=str(folder))
    expected = {number: quiet[number] for number in range(read_commit(killed).step + 1, STEPS + 1)}
    assert losses == pytest.approx(expected, **BF16)


def test_the_operators_batch_sizes_win(tmp_path):
    train(tmp_path, "dp=1", ETJ_GLOBAL_BATCH="8", ETJ_MICRO_BATCH="4")
    commit = read_commit(newest_commit(tmp_path))
    assert (commit.step, commit.samples) == (STEPS, 8 * STEPS)


@pytest.mark.soak_only
def test_dropout_goes_on_as_if_nothing_had_happened_at_the_same_topology(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    quiet = train(first, "dp=2,zero=1", "--dropout", "0.2", "--save-every", "3")
    resume = {"ETJ_ATTEMPT": "2", "ETJ_RESUME": str(first / "a1" / "step-00000003")}
    losses = train(second, "dp=2,zero=1", "--dropout", "0.2", **resume)
    assert losses == pytest.approx({step: quiet[step] for step in (4, 5, 6)}, **SAME)
    # The states matter: without them the masks are others.
    folder = second / "a2" / "step-00000003"
    reshard(first / "a1" / "step-00000003", folder, "dp=2,zero=1")
    without = train(second, "dp=2,zero=1", "--dropout", "0.2", **{**resume, "ETJ_RESUME": str(folder)})
    assert without[4] != pytest.approx(quiet[4], **FP32)
    again = train(second, "dp=2,zero=1", "--dropout", "0.2", **{**resume, "ETJ_RESUME": str(folder)})
    assert again == pytest.approx(without, **SAME)
