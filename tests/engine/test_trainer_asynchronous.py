"""Asynchronous saves of real DeepSpeed and DCP on two ranks: losses after a resume, and kill -9 in every phase."""

import contextlib
import json
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.retention import find_commits
from reshard.commits.commit import check_files, read_commit
from reshard.contract import LeaseKey
from tests.engine.example_run import losses, run, start

pytestmark = pytest.mark.engine

SCRIPT = {"script": "train_flat.py"}
ZERO3 = "dp=2,zero=3"


def settings(root, **extra):
    (root / "node").mkdir(exist_ok=True)
    return {"ETJ_ASYNC_SAVES": "true", "ETJ_STAGING": str(root / "node"), "ETJ_STAGING_BYTES": str(1 << 30), **extra}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps without a crash, saved synchronously after the second and the fourth."""
    root = tmp_path_factory.mktemp("synchronous")
    run(root, ZERO3, "--steps", "4", "--save-every", "2", **SCRIPT)
    return root


def resume(root, reference, *, step, attempt):
    """Go on from the newest commit, which is that of `step`; the losses are those of the undisturbed run."""
    for _, _, folder in find_commits(root):
        check_files(folder, read_commit(folder), crc=True)
    _, newest, folder = max(find_commits(root))
    assert newest == step
    extra = settings(root, ETJ_ATTEMPT=str(attempt), ETJ_RESUME=str(folder))
    run(root, ZERO3, "--steps", "4", "--save-every", "1", **SCRIPT, **extra)
    resumed = losses(root, attempt=attempt)
    assert resumed == pytest.approx({at: reference[at] for at in range(step + 1, 5)}, rel=1e-6)
    assert max(find_commits(root))[1] == 4
    assert list((root / "node").glob("*/*")) == []


def test_a_commit_holds_what_a_synchronous_one_holds_and_resumes_equally(trained, tmp_path):
    run(tmp_path, ZERO3, "--steps", "2", "--save-every", "1", **SCRIPT, **settings(tmp_path))
    folder = tmp_path / "a1" / "step-00000002"
    names = {file.path for file in read_commit(folder).files}
    assert names == {file.path for file in read_commit(trained / "a1" / "step-00000002").files}
    assert (tmp_path / "a1" / "latest").read_text() == "step-00000002"
    assert (tmp_path / "a1" / "zero_to_fp32.py").exists()
    resume(tmp_path, losses(trained), step=2, attempt=2)


def copier_of(launcher):
    """The copy process of the node."""
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if any("copy_process" in word for word in process.cmdline()):
                return process
    return None


def wait_for(what, launcher):
    deadline = time.monotonic() + 240
    while not (found := what()):
        assert launcher.poll() is None, launcher.stdout.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


@pytest.mark.soak_only
@pytest.mark.parametrize("phase", ["staging", "copying", "copied"])
def test_a_training_that_is_killed_in_a_save_resumes_from_the_commit_before(trained, tmp_path, phase):
    extra = settings(tmp_path)
    launcher = start(tmp_path, ZERO3, "--steps", "4", "--save-every", "1", **SCRIPT, **extra)
    ranks = wait_for(lambda: psutil.Process(launcher.pid).children(), launcher)
    wait_for(lambda: [step for _, step, _ in find_commits(tmp_path)] == [1], launcher)
    copier, target = copier_of(launcher), tmp_path / "a1" / "step-00000002"
    if phase == "staging":
        copier.send_signal(signal.SIGSTOP)  # the files stay in the staging folder
        wait_for(lambda: list(tmp_path.glob("node/*/*/*/files/step-00000002/*optim_states.pt")), launcher)
    elif phase == "copying":
        wait_for(lambda: list(target.glob("*.pt")), launcher)
        copier.send_signal(signal.SIGSTOP)
    else:
        wait_for(lambda: target.exists() or list(tmp_path.glob("node/*/*/*/note-0")), launcher)
        ranks[0].send_signal(signal.SIGSTOP)
        wait_for(lambda: list(tmp_path.glob("node/*/*/*.done")), launcher)
    assert not (target / "COMMIT.json").exists()
    for process in ranks:
        process.kill()
    launcher.communicate(timeout=60)
    copier.wait(10)
    resume(tmp_path, losses(trained), step=1, attempt=2)


@pytest.mark.soak_only
def test_a_training_whose_copy_process_is_killed_twice_goes_on(trained, tmp_path):
    launcher = start(tmp_path, ZERO3, "--steps", "4", "--save-every", "1", **SCRIPT, **settings(tmp_path))
    wait_for(lambda: copier_of(launcher), launcher).kill()
    wait_for(lambda: [step for _, step, _ in find_commits(tmp_path)] == [1], launcher)
    if (copier := copier_of(launcher)) is not None:
        copier.kill()
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output[-3000:]
    assert losses(tmp_path) == pytest.approx(losses(trained), rel=1e-6)
    for _, _, folder in find_commits(tmp_path):
        check_files(folder, read_commit(folder), crc=True)
    assert max(find_commits(tmp_path))[1] == 4


@pytest.mark.soak_only
def test_a_drain_commits_the_last_step(tmp_path):
    box = tmp_path / "mailbox.json"
    extra = settings(tmp_path, ETJ_MAILBOX=str(box))
    launcher = start(tmp_path, ZERO3, "--steps", "100000", "--save-every", "1", **SCRIPT, **extra)
    wait_for(lambda: find_commits(tmp_path), launcher)
    FileMailbox(box).exchange({LeaseKey.REQUEST: "drain"})
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 75, output[-3000:]
    assert max(find_commits(tmp_path))[1] == max(losses(tmp_path))
    assert json.loads(box.read_text())[LeaseKey.PHASE] == "Drained"
    assert list((tmp_path / "node").glob("*/*")) == []


@pytest.fixture
def memory():
    """A folder in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["torch", "dcp"])
def test_what_is_saved_is_the_state_at_the_save_and_can_be_loaded(tmp_path, memory, how):
    script = str(Path(__file__).with_name("asynchronous_rank.py"))
    for attempt, steps in ((1, 3), (2, 4)):
        resume = str(max(find_commits(tmp_path))[2]) if attempt == 2 else ""
        extra = settings(tmp_path, ETJ_ATTEMPT=str(attempt), ETJ_RESUME=resume, ETJ_STAGING=str(memory))
        process = start(tmp_path, "dp=2", how, str(steps), script=script, **extra)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-3000:]
        assert f"save of step {steps}: asynchronous" in output
    commit = read_commit(folder := max(find_commits(tmp_path))[2])
    assert commit.step == 4
    check_files(folder, commit, crc=True)
    assert list(memory.glob("*/*")) == []
