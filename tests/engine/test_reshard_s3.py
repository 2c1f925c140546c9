"""Checkpoints in a real S3-compatible store: read by ranges, in few requests, with the same result as from a disk."""

import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.contract import ExitCode
from tests.engine.s3_server import Server, program, serve
from tests.golden.partial import partial

pytestmark = pytest.mark.engine
GOLDEN = Path(__file__).parents[1] / "golden/deepspeed-0.19.8"
RESHARD = [sys.executable, "-m", "reshard.cli.main"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    if program() is None:
        reason = "needs Go to build the S3 server"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with serve(tmp_path_factory.mktemp("s3")) as found:
        yield found


def reshard(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **server.environment}
    return subprocess.run([*RESHARD, *arguments], env=environment, capture_output=True, text=True, check=False)


def upload(server: Server, name: str, bucket: str) -> str:
    shutil.copytree(GOLDEN / name / "step-00000002", server.root / bucket / "run" / "step-00000002")
    return f"s3://{bucket}/run/step-00000002"


@pytest.mark.parametrize(
    ("name", "to"), [("pipeline-tp2-pp2", "tp=1,pp=1,dp=3"), ("zero3-dp3", "dp=2,zero=3"), ("zero2-dp3", "dp=2,zero=1")]
)
def test_the_result_is_that_of_the_same_files_on_a_disk(server: Server, tmp_path: Path, name: str, to: str) -> None:
    url = upload(server, name, f"same-{name}")
    done = reshard(server, "run", url, str(tmp_path / "remote"), "--to", to)
    assert done.returncode == 0, done.stderr
    local = str(GOLDEN / name / "step-00000002")
    assert reshard(server, "run", local, str(tmp_path / "local"), "--to", to).returncode == 0
    names = sorted(path.name for path in (tmp_path / "local").iterdir() if path.suffix == ".pt")
    assert names
    assert filecmp.cmpfiles(tmp_path / "local", tmp_path / "remote", names, shallow=False)[0] == names


def test_the_mean_of_copies_is_that_of_the_same_files_on_a_disk(server: Server, tmp_path: Path) -> None:
    local = partial(tmp_path / "source")
    shutil.copytree(local, server.root / "partial" / "run" / "step-00000002")
    done = reshard(server, "run", "s3://partial/run/step-00000002", str(tmp_path / "remote"), "--to", "tp=1")
    assert done.returncode == 0, done.stderr
    assert "20 tensors are means of copies" in done.stdout
    assert reshard(server, "run", str(local), str(tmp_path / "local"), "--to", "tp=1").returncode == 0
    names = sorted(path.name for path in (tmp_path / "local").iterdir() if path.suffix == ".pt")
    assert names
    assert filecmp.cmpfiles(tmp_path / "local", tmp_path / "remote", names, shallow=False)[0] == names


def test_a_small_file_costs_a_handful_of_requests_whatever_the_number_of_its_tensors(
    server: Server, tmp_path: Path
) -> None:
    url = upload(server, "zero3-dp3", "requests")
    before = len(server.gets())
    assert reshard(server, "run", url, str(tmp_path / "out"), "--to", "dp=2,zero=3").returncode == 0
    num_files = len(list((GOLDEN / "zero3-dp3/step-00000002").glob("*.pt")))
    assert len(server.gets()) - before <= 7 * num_files  # one of them by the witness


def test_a_flipped_bit_in_the_store_is_found(server: Server, tmp_path: Path) -> None:
    url = upload(server, "zero2-dp3", "flipped")
    path = next((server.root / "flipped/run/step-00000002").glob("*rank_0*optim_states.pt"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done = reshard(server, "run", url, str(tmp_path / "out"), "--to", "dp=2,zero=1")
    assert done.returncode != 0
    assert path.name in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_or_a_bucket_that_is_not_there_is_named(server: Server) -> None:
    for url in ("s3://nowhere/run/step-00000002", "s3://requests/nothing"):
        done = reshard(server, "inspect", url)
        assert done.returncode != 0
        assert url in done.stderr
        assert "Traceback" not in done.stderr


def test_a_commit_in_the_store_is_read_and_checked(server: Server, tmp_path: Path) -> None:
    source = str(GOLDEN / "zero2-dp3/step-00000002")
    committed = server.root / "committed" / "step-00000002"
    assert reshard(server, "run", source, str(committed), "--to", "dp=2,zero=2").returncode == 0
    url = "s3://committed/step-00000002"
    assert reshard(server, "verify", url).returncode == 0
    arguments = ("run", url, str(tmp_path / "out"), "--to", "dp=3,zero=2", "--require-commit")
    assert reshard(server, *arguments).returncode == 0
    path = next(committed.glob("*optim_states.pt"))
    path.write_bytes(path.read_bytes()[:-100])
    done = reshard(server, "verify", url)
    assert done.returncode != 0
    assert path.name in done.stderr


def test_a_store_that_wants_credentials_is_named_with_what_to_do(server: Server) -> None:
    environment = {**os.environ, **server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    command = [*RESHARD, "inspect", "s3://requests/run/step-00000002"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.SOURCE_UNAVAILABLE
    assert "s3://requests" in done.stderr
    assert "AWS_ACCESS_KEY_ID" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_training_folder_is_one_unit_there_too(server: Server, tmp_path: Path) -> None:
    folder = server.root / "trainers" / "checkpoint-2"
    shutil.copytree(GOLDEN / "zero2-dp3" / "step-00000002", folder / "global_step2")
    files = {"latest": b"global_step2", "trainer_state.json": b"{}", "tokenizer/vocab.txt": b"a\nb\n"}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    done = reshard(server, "run", "s3://trainers/checkpoint-2", str(tmp_path / "out"), "--to", "dp=2")
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in files.items())
    done = reshard(server, "verify", "s3://trainers/checkpoint-2", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
