"""Rank 0 reads its first commit as the resharder does, and tells the log and the operator what would be refused."""

from __future__ import annotations

import copy
import io
import logging
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.api.pod_reports import Refused, parse_refused
from elastic_trainer.heartbeat import Heartbeat
from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.publisher import Publisher
from elastic_trainer.saving.refusals import RefusalCheck, find_refusals
from elastic_trainer.settings import from_env
from reshard.api import index_of
from reshard.commits.commit import Commit, CommittedFile
from reshard.contract import LeaseKey
from reshard.errors import NotACheckpointError, UnsafePickleError
from reshard.formats.pt.emit import emit
from reshard.formats.pt.objects import Global, Inert
from reshard.storage.durable import file_crc32
from reshard.topology import Topology
from tests.golden.dcp_files import add_entries, edit_metadata, stored
from tests.golden.dcp_files import golden as dcp
from tests.golden.files import any_name, edit
from tests.golden.files import golden as deepspeed

SOURCE = deepspeed("zero2-dp3")
STATE = Inert("new", Global("mine", "State"), (), {"epoch": 3})


def foreign(folder: Path, *names: str) -> Path:
    """A commit whose `client_state` holds objects of these classes."""
    source = shutil.copytree(SOURCE, folder / "in", ignore=shutil.ignore_patterns("COMMIT.json"))
    kinds = {name.lower(): Inert("new", Global("mine", name), (), {"epoch": 3}) for name in names}
    edit(source, "mp_rank_00_model_states.pt", lambda value: value.update(trainer=kinds))
    return source


def check(folder: Path, times: int = 1) -> list[str]:
    """Let the process read the commit; return what it tells the operator."""
    told: list[str] = []
    done = threading.Event()

    def tell(annotations: dict[LeaseKey, str]) -> None:
        told.append(annotations[LeaseKey.REFUSED])
        done.set()

    checks = RefusalCheck(tell)
    for _ in range(times):
        checks.begin(folder)
    assert done.wait(60)
    return told


def test_what_is_refused_is_told_once_by_key_and_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (text,) = check(foreign(tmp_path, "State", "Color"), times=3)
    found = parse_refused(text)
    assert found.to_allow == ("mine.Color", "mine.State")
    assert "mine.State at trainer.state" in found.message
    assert "mine.Color at trainer.color" in found.message
    (record,) = caplog.records
    assert "set spec.checkpoint.allowedGlobals: [mine.Color, mine.State], or save plain data" in record.getMessage()


def test_a_commit_of_plain_data_is_told_as_such_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (text,) = check(SOURCE)
    assert parse_refused(text) == Refused("", ())
    assert not caplog.records


@pytest.mark.parametrize("name", ["os.system", "mine.Outer.Inner"])
def test_what_can_never_be_allowed_is_no_advice(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.partition(".")
    source = foreign(tmp_path, "State")
    item = Inert("new", Global(module, attribute), (), {})
    edit(source, "zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda value: value.update(mine=item))
    message, names = find_refusals(source)
    assert name in message
    assert "mine.State" in message
    assert names == []


def test_names_that_are_not_enough_are_no_advice(tmp_path: Path) -> None:
    """The pickle breaks off behind the class, at a key that is not read."""
    source = shutil.copytree(SOURCE, tmp_path / "in", ignore=shutil.ignore_patterns("COMMIT.json"))
    objects = {"trainer": STATE, "seen": {("cpu", Global("torch", "float32")): 1}}
    edit(source, "mp_rank_00_model_states.pt", lambda value: value.update(objects))
    message, names = find_refusals(source)
    assert "mine.State" in message
    assert "a key is a tuple of something other than scalars" in message
    assert names == []
    with pytest.raises(UnsafePickleError) as refused:
        index_of(source)
    assert refused.value.to_allow == ()
    assert "--allow-global" not in refused.value.hint


def test_what_is_refused_of_another_file_is_told_with_the_names(tmp_path: Path) -> None:
    source = foreign(tmp_path, "State")
    key = ("cpu", Global("torch", "float32"))
    edit(source, "zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda value: value.update(seen={key: 1}))
    message, names = find_refusals(source)
    assert "mine.State" in message
    assert "a key is a tuple" in message
    assert names == []


def test_a_commit_of_no_known_format_is_told_as_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.npz").write_bytes(b"own")
    message, names = find_refusals(tmp_path)
    assert message == "no known checkpoint format"
    assert names == []


def test_a_commit_that_is_removed_meanwhile_is_not_told_as_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        find_refusals(tmp_path / "gone")


def test_a_reader_that_cannot_be_started_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_args: Any, **_named: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    checks = RefusalCheck(pytest.fail)
    for _ in range(2):
        checks.begin(SOURCE)
    for thread in [thread for thread in threading.enumerate() if thread.name == "refusals"]:
        thread.join(60)
    (record,) = caplog.records
    assert "its reader cannot be started: [Errno 11]" in record.getMessage()


def test_extra_state_of_a_dcp_checkpoint_is_read_as_well(tmp_path: Path) -> None:
    """A conversion reads such objects when it lays out its files, not when it indexes the source."""
    source = shutil.copytree(dcp("tp2-fsdp2-titan"), tmp_path / "in", ignore=shutil.ignore_patterns("COMMIT.json"))
    add_entries(source, {"app.extra": "lr_scheduler.last_epoch"})
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        with any_name():
            archive.writestr("archive/data.pkl", emit({"state": STATE})[0])
        archive.writestr("archive/version", "3\n")

    def place(state: Any) -> None:
        info = copy.copy(stored(state, "app.extra"))
        with (source / info.state["relative_path"]).open("ab") as stream:
            info.state = {**info.state, "offset": stream.tell(), "length": stream.write(content.getvalue())}
        for index in state["storage_data"]:
            if index.state["fqn"] == "app.extra":
                state["storage_data"][index] = info

    edit_metadata(source, place)
    message, names = find_refusals(source)
    assert message.endswith("item app.extra: mine.State at state")
    assert names == ["mine.State"]


def test_what_no_name_makes_convertible_is_told_as_well() -> None:
    message, names = find_refusals(deepspeed("elastic-dp2"))
    assert message.startswith("is an elastic checkpoint, which keeps no settings of the optimizer")
    assert names == []


@pytest.mark.parametrize("lease", ["gpt-a1", ""])
def test_the_first_published_commit_of_a_job_is_read_and_its_lease_says_what_is_refused(
    lease: str, tmp_path: Path
) -> None:
    folder = tmp_path / "ckpt/a1/step-00000002"
    shutil.copytree(foreign(tmp_path, "State"), folder)
    environment = {"ETJ_ATTEMPT": "1", "ETJ_CHECKPOINT_ROOT": str(tmp_path / "ckpt"), "ETJ_LEASE": lease}
    mailbox = FileMailbox(tmp_path / "lease.json")
    heartbeat = Heartbeat(mailbox, every_seconds=3600, on_fenced=print)
    publisher = Publisher(from_env(environment), heartbeat, keep=3)
    files = [
        CommittedFile(path=path.name, num_bytes=path.stat().st_size, crc32=file_crc32(path))
        for path in folder.iterdir()
    ]
    facts: dict[str, Any] = {"format": "deepspeed", "step": 2, "samples": 0, "writer": "trainer", "attempt": 1}
    publisher.publish(folder, Commit(**facts, topology=Topology(dp=3, zero=2), files=files))
    assert heartbeat.flush()
    readers = [thread for thread in threading.enumerate() if thread.name == "refusals"]
    for thread in readers:
        thread.join(60)
    assert heartbeat.flush()
    text = mailbox.read().get(LeaseKey.REFUSED, "")
    assert (parse_refused(text).to_allow == ("mine.State",)) if lease else not (readers or text)
