"""The staging folder of a node: shared by its ranks, removed after a crash, never taken from a process that lives."""

import pytest

from elastic_trainer.errors import ConfigurationError
from elastic_trainer.saving import staging
from reshard.errors import TargetError


def test_a_folder_that_nobody_holds_is_removed_and_one_that_is_held_stays(tmp_path):
    first, lock = staging.create(tmp_path)
    (first / "large").write_text("x")
    other = staging.join(first)
    staging.release(first, lock, remove=False)  # as the kernel does when the first rank is killed
    second, lock = staging.create(tmp_path)
    assert (first / "large").exists()  # another rank lives
    staging.release(first, other, remove=False)
    third, _ = staging.create(tmp_path)
    assert not first.exists()
    assert {path.name for path in second.parent.iterdir()} == {
        name for folder in (second, third) for name in (folder.name, f"{folder.name}.lock")
    }
    staging.release(second, lock, remove=True)
    assert not second.exists()


def test_a_folder_without_a_lock_is_removed(tmp_path):
    folder, lock = staging.create(tmp_path)
    staging.release(folder, lock, remove=True)
    left = folder.with_name("save-0123")
    left.mkdir()
    staging.create(tmp_path)
    assert not left.exists()


def test_a_rank_on_another_node_is_told_what_to_set(tmp_path):
    with pytest.raises(ConfigurationError, match="set LOCAL_RANK to 0 where each rank has a container of its own"):
        staging.join(tmp_path / "save-1")


def test_a_staging_folder_that_is_not_there_names_the_variable(tmp_path):
    with pytest.raises(TargetError, match="set ETJ_STAGING to a folder on this node"):
        staging.create(tmp_path / "missing")


def test_files_in_memory_are_told_from_files_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "free_memory_bytes", lambda: 5)
    monkeypatch.setattr(staging, "is_in_memory", lambda folder: True)
    assert staging.free_bytes(tmp_path) == 5
    monkeypatch.setattr(staging, "is_in_memory", lambda folder: False)
    assert staging.free_bytes(tmp_path) > 5
