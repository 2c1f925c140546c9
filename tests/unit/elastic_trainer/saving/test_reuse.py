"""torch.save writes over spares of the save before; a module of that name stands for torch."""

import sys
from types import SimpleNamespace

import pytest

from elastic_trainer.saving import copy_process
from elastic_trainer.saving.copy_process import carry_out
from elastic_trainer.saving.reports import CopyOrder
from elastic_trainer.saving.reuse import num_bytes, reuse_spares


@pytest.fixture
def torch(monkeypatch):
    """Of torch: `save` and the switch for checksums."""

    def save(obj, f):
        checksum = b"+" if module.crc32 else b""
        if hasattr(f, "write"):
            f.write(obj + checksum)
        else:
            with open(f, "wb") as stream:
                stream.write(obj + checksum)

    module = SimpleNamespace(save=save, crc32=True)
    module.serialization = SimpleNamespace(
        get_crc32_options=lambda: module.crc32, set_crc32_options=lambda value: setattr(module, "crc32", value)
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def stage(node, token, files):
    """Save files as a framework does; return the order to copy them."""
    folder = node / token / "files" / "step-1"
    folder.mkdir(parents=True)
    with reuse_spares(folder, node / "spares"):
        for name, content in files.items():
            sys.modules["torch"].save(content, str(folder / name))
    (node / token / "note-0").write_text("")
    target = node.parent / "a1"
    (target / ".saves").mkdir(parents=True, exist_ok=True)
    report = target / ".saves" / f"{token}.json"
    return CopyOrder(staged=node / token, target=target, tag="step-1", report=report, node=0, local_ranks=1)


def test_the_memory_of_a_save_is_written_over_by_the_next_one(torch, tmp_path, monkeypatch):
    monkeypatch.setattr(copy_process, "is_in_memory", lambda folder: True)
    node, save = tmp_path / "node", torch.save
    carry_out(stage(node, "one", {"w": b"long content", "gone": b"x"}))
    spare = (node / "spares" / "w").stat().st_ino
    assert num_bytes(node / "spares") > 0
    carry_out(stage(node, "two", {"w": b"short", "new": b"y"}))
    assert (node / "spares" / "w").stat().st_ino == spare
    assert {path.name: path.read_bytes() for path in (node / "spares").iterdir()} == {"w": b"short", "new": b"y"}
    assert (tmp_path / "a1" / "step-1" / "w").read_bytes() == b"short"
    assert (torch.save, torch.crc32) == (save, True)


def test_nothing_is_kept_on_a_disk_or_of_files_that_torch_did_not_write(torch, tmp_path, monkeypatch):
    carry_out(stage(tmp_path / "node", "one", {"w": b"x"}))
    monkeypatch.setattr(copy_process, "is_in_memory", lambda folder: True)
    carry_out(stage(tmp_path / "node", "two", {}))
    assert [path.suffix for path in sorted((tmp_path / "node").iterdir())] == [".done", ".done"]


def test_other_calls_of_torch_save_are_left_alone(torch, tmp_path):
    with reuse_spares(tmp_path / "one" / "files" / "step-1", tmp_path / "spares"):
        torch.save(b"x", tmp_path / "elsewhere")
        with open(tmp_path / "stream", "wb") as stream:
            torch.save(b"y", stream)
    assert (tmp_path / "elsewhere").read_bytes() == b"x"
    assert (tmp_path / "stream").read_bytes() == b"y"


def test_a_failed_write_restores_torch(torch, tmp_path):
    save = torch.save
    with pytest.raises(OSError, match="full"), reuse_spares(tmp_path / "one" / "files" / "step-1", tmp_path / "spares"):
        raise OSError("full")
    assert (torch.save, torch.crc32) == (save, True)
