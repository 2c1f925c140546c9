"""Folders of training stacks as one unit: the checkpoint inside is converted, the files beside it are carried."""

import os
import shutil
from pathlib import Path

import pytest

from reshard import api
from reshard.cli.locate import find_newest
from reshard.commits.commit import read_commit
from reshard.commits.staging import Sharing
from reshard.contract import ExitCode
from reshard.errors import CorruptSourceError, SourceChangedError
from reshard.execution.verify import read_digests
from reshard.topology import Topology
from tests.golden.command import HERE, ZERO2, Answer

SIDE_FILES = {
    "trainer_state.json": b'{"global_step": 2}',
    "scheduler.pt": b"schedule",
    "config.json": b"{}",
    "tokenizer/vocab.txt": b"a\nb\n" * 3_000_000,  # several blocks
    "empty.txt": b"",
}


def make_folder(folder: Path, tag: str, files: dict[str, bytes]) -> Path:
    shutil.copytree(ZERO2, folder / tag)
    (folder / tag / "COMMIT.json").unlink(missing_ok=True)
    (folder / "latest").write_text(tag)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """As the Trainer saves at three ranks."""
    ranks = {f"rng_state_{rank}.pth": b"random" for rank in range(3)}
    folder = make_folder(tmp_path / "checkpoint-2", "global_step2", SIDE_FILES | ranks)
    shutil.copy(next((HERE / "safetensors" / "llama").glob("*.safetensors")), folder / "model.safetensors")
    return folder


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    ranks = {f"random_states_{rank}.pkl": b"random" for rank in range(3)}
    return make_folder(tmp_path / "state", "pytorch_model", {"scheduler.bin": b"schedule", "sampler.bin": b"1"} | ranks)


def test_a_trainer_folder_is_converted_as_one_unit(tmp_path: Path, trainer: Path, say: Answer) -> None:
    out = tmp_path / "new" / "checkpoint-2"
    plan = say.json("plan", trainer, out, "--to", "dp=2")
    report = say.json("run", trainer, out, "--to", "dp=2")
    assert (report["witness"]["tensors"], report["witness"]["not_witnessed"]) == (29, 0)
    say("run", ZERO2, tmp_path / "inner", "--to", "dp=2")
    assert list_files(out / "global_step2") == list_files(tmp_path / "inner") - {"COMMIT.json"}
    assert (out / "latest").read_text() == "global_step2"
    for name in (*SIDE_FILES, "model.safetensors"):
        assert (out / name).read_bytes() == (trainer / name).read_bytes()
    assert not list(out.glob("rng_state_*"))
    notes = "\n".join(plan["notes"])
    assert "rng_state_0.pth, rng_state_1.pth, rng_state_2.pth: left out" in notes
    commit = read_commit(out)
    assert {file.path for file in commit.files} | {"COMMIT.json"} == list_files(out)
    assert all(file.crc32 is not None for file in commit.files)
    assert plan["files_to_write"] == len(commit.files)
    assert read_digests(api.index_of(out)) == read_digests(api.index_of(tmp_path / "inner"))


def test_at_the_same_number_of_ranks_each_keeps_its_random_state(tmp_path: Path, trainer: Path, say: Answer) -> None:
    say("run", trainer, tmp_path / "out", "--to", "dp=3,zero=1")
    assert list_files(tmp_path / "out") >= {f"rng_state_{rank}.pth" for rank in range(3)}
    (trainer / "rng_state_2.pth").unlink()
    notes = say.json("plan", trainer, "--to", "dp=3")["notes"]
    assert any("2 files of random states for 3 ranks" in note for note in notes)


def test_a_converted_folder_is_inspected_verified_and_converted_again(
    tmp_path: Path, trainer: Path, say: Answer
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    say("run", trainer, out, "--to", "dp=2", "--reread")
    found = say.json("inspect", out)
    assert (found["format"], found["commit"]["state"]) == ("deepspeed", "intact")
    assert any("folder of Hugging Face's Trainer" in note for note in found["notes"])
    say("verify", out, trainer)
    say("run", out, back, "--to", "dp=3", "--require-commit")
    say("verify", back, ZERO2)
    assert "already converted" in say.json("run", trainer, out, "--to", "dp=2")["message"]
    (out / "scheduler.pt").write_bytes(b"schemule")
    say("verify", out, code=ExitCode.SOURCE_INVALID)
    say("run", out, tmp_path / "again", "--to", "dp=3", code=ExitCode.SOURCE_INVALID)


@pytest.mark.parametrize("change", ["content", "gone", "new"])
def test_a_changed_side_file_is_not_taken_for_what_was_converted(
    tmp_path: Path, trainer: Path, say: Answer, change: str
) -> None:
    out = tmp_path / "out"
    say("run", trainer, out, "--to", "dp=2")
    if change == "gone":
        (trainer / "scheduler.pt").unlink()
    else:
        (trainer / ("scheduler.pt" if change == "content" else "more.txt")).write_bytes(b"SCHEDULE")
    say("run", trainer, out, "--to", "dp=2", code=ExitCode.TARGET_FAILED)


def test_a_side_file_that_changes_during_the_run_is_noticed(tmp_path: Path, trainer: Path) -> None:
    def change(_plan: object) -> None:
        (trainer / "scheduler.pt").write_bytes(b"another schedule")

    conversion = api.Conversion(source=trainer, target=tmp_path / "out", topology=Topology(dp=2, zero=2))
    with pytest.raises(SourceChangedError, match="changed"):
        api.convert(conversion, hooks=api.Hooks(on_plan=change))
    assert not (tmp_path / "out").exists()


def test_a_killed_run_is_resumed(tmp_path: Path, trainer: Path, say: Answer) -> None:
    class Killed(BaseException):
        pass

    def die(_bytes: int) -> None:
        raise Killed

    conversion = api.Conversion(source=trainer, target=tmp_path / "out", topology=Topology(dp=2, zero=2))
    options = api.RunOptions(sharing=Sharing.RESUMABLE, num_threads=1)
    with pytest.raises(Killed):
        api.convert(conversion, options, hooks=api.Hooks(on_progress=die))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out.partial-")]
    api.convert(conversion, options)
    say("verify", tmp_path / "out", ZERO2)
    assert (tmp_path / "out" / "scheduler.pt").read_bytes() == b"schedule"


def test_a_link_beside_the_checkpoint_is_refused(tmp_path: Path, trainer: Path, say: Answer) -> None:
    (tmp_path / "secret").write_text("secret")
    (trainer / "notes.txt").symlink_to(tmp_path / "secret")
    found = say.json("run", trainer, tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert found["path"] == str(trainer / "notes.txt")
    assert "is a symbolic link" in found["message"]
    (trainer / "notes.txt").unlink()
    os.mkfifo(trainer / "pipe")
    found = say.json("run", trainer, tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert "is a pipe" in found["message"]


def test_what_cannot_apply_to_a_unit_is_refused(tmp_path: Path, trainer: Path, say: Answer) -> None:
    words = ("run", trainer, tmp_path / "out", "--to", "dp=2")
    found = say.json(*words, "--mode", "virtual", code=ExitCode.UNSUPPORTED)["error"]
    assert "--mode virtual" in found["message"] and "global_step2" in found["message"]
    found = say.json(*words, "--latest", code=ExitCode.USAGE)["error"]
    assert "--latest" in found["message"]
    assert not (tmp_path / "out").exists() and not (tmp_path / "latest").exists()


def test_another_format_or_a_part_is_a_plain_checkpoint(tmp_path: Path, trainer: Path, say: Answer) -> None:
    for target, words in (
        ("weights", ("--format", "safetensors")),
        ("atoms", ("--format", "universal")),
    ):
        plan = say.json("plan", trainer, tmp_path / target, *words)
        assert any("are not carried" in note for note in plan["notes"])
        say("run", trainer, tmp_path / target, *words)
        assert not (tmp_path / target / "trainer_state.json").exists()
    say("verify", tmp_path / "weights", ZERO2)


def test_the_newest_checkpoint_of_a_training_folder_is_the_one_inside(trainer: Path) -> None:
    assert find_newest(trainer) == trainer / "global_step2"


def test_several_checkpoints_inside_are_no_unit(tmp_path: Path, accelerate: Path, say: Answer) -> None:
    shutil.copytree(accelerate / "pytorch_model", accelerate / "pytorch_model_1")
    found = say.json("run", accelerate, tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert "holds 2 checkpoints, and is none itself" in found["message"]


def test_a_state_of_accelerate_is_converted_as_one_unit(tmp_path: Path, accelerate: Path, say: Answer) -> None:
    out = tmp_path / "out"
    notes = "\n".join(say.json("plan", accelerate, "--to", "dp=2")["notes"])
    assert "scheduler.bin" in notes and "3 ranks" in notes
    say("run", accelerate, out, "--to", "dp=2")
    assert (out / "latest").read_text() == "pytorch_model"
    assert list_files(out) >= {"scheduler.bin", "sampler.bin"}
    assert not list(out.glob("random_states_*"))
    say("verify", out, ZERO2)
    same = "\n".join(say.json("plan", accelerate, "--to", "dp=3")["notes"])
    assert "scheduler.bin" not in same
    say("run", accelerate, tmp_path / "same", "--to", "dp=3")
    assert len(list((tmp_path / "same").glob("random_states_*.pkl"))) == 3


def test_a_checkpoint_of_lightning_is_converted_as_one_unit(tmp_path: Path, say: Answer) -> None:
    folder = make_folder(tmp_path / "last.ckpt", "checkpoint", {"zero_to_fp32.py": b"#"})
    say("run", folder, tmp_path / "new.ckpt", "--to", "dp=2")
    assert (tmp_path / "new.ckpt" / "latest").read_text() == "checkpoint"
    say("verify", tmp_path / "new.ckpt", ZERO2)


def test_a_training_folder_serves_as_example(tmp_path: Path, trainer: Path, say: Answer) -> None:
    say("run", trainer, tmp_path / "weights", "--format", "safetensors", "--states", "weight")
    say("run", trainer, tmp_path / "out", "--to", "dp=1", "--like", trainer)
    say("verify", tmp_path / "out", ZERO2)


def test_a_damaged_latest_names_no_checkpoint(tmp_path: Path, trainer: Path, say: Answer) -> None:
    (trainer / "model.safetensors").unlink()
    for text in ("global_step3", "../checkpoint-2/global_step2", "", "\xff"):
        (trainer / "latest").write_bytes(text.encode("latin-1"))
        found = say.json("run", trainer, tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
        assert "holds 1 checkpoint, and is none itself" in found["message"]


def test_a_link_to_the_checkpoint_inside_is_not_followed(tmp_path: Path, trainer: Path, say: Answer) -> None:
    (trainer / "model.safetensors").unlink()
    (trainer / "global_step2").rename(tmp_path / "elsewhere")
    (trainer / "global_step2").symlink_to(tmp_path / "elsewhere")
    say.json("run", trainer, tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)


def test_files_of_an_unfinished_run_are_not_carried(tmp_path: Path, trainer: Path, say: Answer) -> None:
    for name in (".finish", ".COMMIT.json.12", ".hidden"):
        (trainer / name).write_bytes(b"1")
    for folder in (".x.partial-12ab", ".journal"):
        (trainer / folder).mkdir()
        (trainer / folder / "file").write_bytes(b"1")
    say("run", trainer, tmp_path / "out", "--to", "dp=2")
    say("verify", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")} == {".hidden"}


def test_workers_make_one_unit_together(tmp_path: Path, trainer: Path, say: Answer) -> None:
    for worker in ("0/2", "1/2"):
        say("run", trainer, tmp_path / "out", "--to", "dp=2", "--worker", worker)
    say("verify", tmp_path / "out", trainer)
    assert (tmp_path / "out" / "trainer_state.json").exists()


def test_memory_does_not_grow_with_the_files_beside(trainer: Path) -> None:
    layout = api.plan_of(api.index_of(trainer), Topology(dp=2, zero=2)).layout
    vocabulary = next(file for file in layout.files if file.path == "tokenizer/vocab.txt")
    assert [len(content) for _, content in vocabulary.fixed] == [4 << 20, 4 << 20, 12_000_000 - (8 << 20)]


@pytest.mark.parametrize("name", [b"\xff.txt", b"a\nb.txt"])
def test_a_name_that_no_commit_can_state_is_refused(tmp_path: Path, trainer: Path, say: Answer, name: bytes) -> None:
    (trainer / os.fsdecode(name)).write_bytes(b"1")
    found = say.json("plan", trainer, tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert "no plain text" in found["message"]


def test_a_file_that_is_cut_short_or_gone_when_it_is_copied_is_named(trainer: Path) -> None:
    layout = api.plan_of(api.index_of(trainer), Topology(dp=2, zero=2)).layout
    schedule = next(file for file in layout.files if file.path == "scheduler.pt")
    assert list(schedule.fixed) == list(schedule.fixed[:]) == [(0, b"schedule")]
    (trainer / "scheduler.pt").write_bytes(b"sch")
    with pytest.raises(CorruptSourceError, match="fewer than the 8 bytes"):
        list(schedule.fixed)
    (trainer / "scheduler.pt").unlink()
    with pytest.raises(CorruptSourceError, match="cannot be read"):
        list(schedule.fixed)


def test_the_commit_of_the_checkpoint_inside_is_compared(tmp_path: Path, trainer: Path, say: Answer) -> None:
    shutil.rmtree(trainer / "global_step2")
    say("run", ZERO2, trainer / "global_step2", "--to", "dp=3")
    say("run", trainer, tmp_path / "out", "--to", "dp=2")
    assert not (tmp_path / "out" / "global_step2" / "COMMIT.json").exists()
    path = trainer / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = bytearray(path.read_bytes())
    content[10] ^= 1  # time of the first entry of the archive, which no reader looks at
    path.write_bytes(content)
    found = say.json("run", trainer, tmp_path / "other", "--to", "dp=2", code=ExitCode.SOURCE_INVALID)["error"]
    assert "not what was committed" in found["message"]
