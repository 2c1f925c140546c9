"""Fuzz targets: each makes one case from a `random.Random`, in a folder of its own, and judges what comes out.

A target returns what became of the case (`same`, `other`, or the name of the error's class), so that a run can tell
whether its cases reach anything. A finding is an exception.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from reshard.api import Conversion, RunOptions, convert
from reshard.checksums import self_checksum
from reshard.commits.commit import Commit, CommittedFile, check_files, read_commit
from reshard.errors import ReshardError
from reshard.execution.journal import Journal
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.dcp.archive import Window, read_directory
from reshard.formats.dcp.metadata import read_metadata
from reshard.formats.pt import machine
from reshard.formats.pt.archive import Entry
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import build, read
from reshard.storage.durable import file_crc32
from reshard.storage.files import open_file
from reshard.topology import Topology
from tests.fuzz import mutate
from tests.fuzz.guard import outcome_of, state_of

GOLDEN = Path(__file__).parents[1] / "golden"
STEP = "step-00000002"

Target = Callable[[Random, Path], str]


def _golden(*pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(path for one in pattern for path in GOLDEN.glob(one)))


@functools.cache
def checkpoints() -> dict[str, tuple[Path, Topology]]:
    """Golden checkpoints of all formats, and what each is converted to."""
    found: dict[str, tuple[Path, Topology]] = {}
    wanted = {
        f"deepspeed-0.19.8/pipeline-tp2-pp2/{STEP}": "tp=1,pp=1,dp=2,zero=1",
        f"deepspeed-0.19.8/pipeline-dp2/{STEP}": "tp=2,pp=1,dp=1,zero=1",
        f"deepspeed-0.19.8/zero2-dp3/{STEP}": "dp=2,zero=2",
        f"deepspeed-0.19.8/zero3-dp3/{STEP}": "dp=2,zero=3",
        f"deepspeed-0.19.8/bf16-dp2/{STEP}": "dp=3,zero=1",
        f"deepspeed-0.19.8/zero0-dp2/{STEP}": "dp=1,zero=0",
        f"dcp-2.13/fsdp2-flat/{STEP}": "dp=3,zero=3",
        f"dcp-2.13/tp2-fsdp2-titan/{STEP}": "dp=1,zero=3",
        f"dcp-2.13/single-nested/{STEP}": "dp=2,zero=3",
        "safetensors/llama": "zero=0",
        "safetensors/odd": "zero=0",
    }
    for name, topology in wanted.items():
        path = GOLDEN / name
        if path.is_dir():
            found[name] = path, Topology.parse(topology)
    return found


@functools.cache
def archives() -> tuple[bytes, ...]:
    """`.pt` files of all kinds."""
    return tuple(path.read_bytes() for path in _golden("deepspeed-0.19.8/*/*/*.pt"))


@functools.cache
def pickles() -> tuple[tuple[bytes, bytes], ...]:
    """(`data.pkl`, archive that holds it)."""
    return tuple((pickle_of(path), path.read_bytes()) for path in _golden("deepspeed-0.19.8/*/*/*.pt"))


def pickle_of(path: Path) -> bytes:
    """`data.pkl` of a `.pt` file, by the standard library's reading."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


def _name_of(result: Any, same: bool | None = None) -> str:
    if isinstance(result, ReshardError):
        return type(result).__name__
    return "other" if same is None else "same" if same else "other"


def _walk(value: Any) -> None:
    """Visit and print a whole object tree, as any consumer may."""
    repr(value)
    json.dumps(str(value)[:1000])


def pickle_machine(chance: Random, _folder: Path) -> str:
    """The pickle machine on operations in any order, and on real pickles that were edited."""
    data = (
        mutate.random_pickle(chance)
        if chance.random() < 0.5
        else mutate.pickle_edit(chance.choice(pickles())[0], chance)
    )
    entries = {f"data/{key}": Entry(name=f"data/{key}", offset=64, num_bytes=64, crc32=1) for key in range(40)}
    plain = chance.random() < 0.5

    def action() -> Any:
        if plain:
            value = machine.load(
                data, persistent_load=lambda key: None, rebuild=machine.rebuild_containers, path="case"
            )
        else:
            value, _ = build(data, entries, "case")
        _walk(value)
        return value

    return _name_of(outcome_of(action))


def archive(chance: Random, folder: Path) -> str:
    """A `.pt` file with a damaged zip structure; what is still read of it lies inside the file."""
    data = chance.choice((mutate.zip_fields, mutate.zip_fields, mutate.splice, mutate.flip))(
        chance.choice(archives()), chance
    )
    return _read_pt(data, folder)


def archive_pickle(chance: Random, folder: Path) -> str:
    """A `.pt` file whose pickle was edited and whose checksums fit: tampering, not damage."""
    old, whole = chance.choice(pickles())
    return _read_pt(mutate.replace_pickle(whole, old, mutate.pickle_edit(old, chance)), folder)


def _read_pt(data: bytes, folder: Path) -> str:
    path = folder / "case.pt"
    path.write_bytes(data)

    def action() -> Any:
        found = read(path)
        for storage in found.storages.values():
            assert 0 <= storage.file_offset <= storage.file_offset + storage.num_bytes <= len(data)
        _check_tensors(found.value, 0)
        _walk(found.value)
        return found

    return _name_of(outcome_of(action))


def _check_tensors(value: Any, depth: int) -> None:
    """Every tensor of an object tree lies inside of its storage."""
    if isinstance(value, Tensor):
        last = value.offset + sum((s - 1) * t for s, t in zip(value.shape, value.stride, strict=True))
        assert 0 in value.shape or 0 <= value.offset <= last < value.storage.num_elements
    elif isinstance(value, dict):
        for item in value.values():
            _check_tensors(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_tensors(item, depth + 1)


def commit(chance: Random, folder: Path) -> str:
    """COMMIT.json, read and used."""
    (folder / "w").write_bytes(b"0123456789")
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub/v").write_bytes(b"")
    original = Commit(
        format="deepspeed",
        step=7,
        samples=70,
        topology=Topology(tp=2, dp=3),
        attempt=1,
        writer="reshard",
        files=[
            CommittedFile(path="w", num_bytes=10, crc32=file_crc32(folder / "w")),
            CommittedFile(path="sub/v", num_bytes=0, crc32=None),
        ],
        digests={"fp32/a": "000000ff", "weight/a": "89abcdef"},
        data={"seed": 1},
        model={"pipeline": {"num_layers": 4, "parts": [0, 2, 4]}},
        source="/a/b",
        created="2026-01-01T00:00:00Z",
    )
    has_checksum = chance.random() < 0.5
    text = (
        self_checksum.with_self_checksum(original.to_dict())
        if has_checksum
        else json.dumps(original.to_dict()).encode()
    )
    changed = (
        chance.choice((mutate.json_edit, mutate.flip))(text, chance) if has_checksum else mutate.json_edit(text, chance)
    )
    (folder / "COMMIT.json").write_bytes(changed)

    def action() -> Any:
        found = read_commit(folder)
        check_files(folder, found, crc=True)
        check_commit(found)
        return found

    result = outcome_of(action)
    if has_checksum and isinstance(result, Commit):
        assert self_checksum.FIELD.encode() not in changed or changed == text, "a damaged marker passed for a sound one"
    return _name_of(result, isinstance(result, Commit) and result == read_commit(folder) and changed == text)


def check_commit(found: Commit) -> None:
    """Its fields are of the types that the page docs/checkpoint-format.md says, whoever wrote it."""
    assert all(type(number) is int for number in (found.step, found.samples, found.attempt))
    assert all(type(text) is str for text in (found.format, found.writer, found.source, found.created))
    assert all(type(k) is str and 0 <= int(v, 16) < 1 << 32 for k, v in found.digests.items())
    assert all(type(k) is str and type(v) is str for k, v in found.options.items())
    assert all(type(file.path) is str and type(file.num_bytes) is int for file in found.files)
    assert isinstance(found.data, dict)
    assert isinstance(found.model, dict)
    json.dumps(found.to_dict()).encode()
    found.ref("/x").to_json()


_RECORD = {
    "unit": 3,
    "source": [[0, "000000ff"], [1, "89abcdef"]],
    "target": [[0, 0, "000000ff"], [0, 1, "000000ff"], [1, 0, "89abcdef"]],
    "read": [[0, 64, 256, 123456], [1, 0, 64, 5]],
    "written": [[0, 128, 320, 99]],
}


def journal(chance: Random, folder: Path) -> str:
    """The journal of an unfinished result: a record that is not one is as good as none."""
    place = Journal(folder)
    text = json.dumps(_RECORD).encode()
    changed = mutate.json_edit(text, chance)
    name = chance.choice(("00000003.json", "00000003.json", "00000003.json", "3x.json", "99999999999999999999.json"))
    (folder / ".journal" / name).write_bytes(changed)

    def action() -> Any:
        place.done()
        records = place.records()
        assert len(records) <= 1
        for record in records:
            assert all(type(n) is int and type(d) is int and 0 <= d < 1 << 32 for n, d in record.source.items())
            assert all(0 <= d < 1 << 32 for d in record.target.values())
            pieces = [piece for every in (record.read, record.written) for some in every.values() for piece in some]
            assert all(type(number) is int and number >= 0 for piece in pieces for number in piece)
        return records

    result = outcome_of(action)
    assert not isinstance(result, ReshardError)
    return "other" if result else "none"


def safetensors(chance: Random, folder: Path) -> str:
    """A safetensors file with another header."""
    source = chance.choice(_golden("safetensors/*/*.safetensors"))
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = mutate.json_edit(data[8 : 8 + length], chance)
    stated = len(header) if chance.random() < 0.9 else mutate.number(chance, 64)
    (folder / "model.safetensors").write_bytes(stated.to_bytes(8, "little") + header + data[8 + length :])
    return _name_of(outcome_of(lambda: _all_bytes(folder)))


def _all_bytes(folder: Path) -> Any:
    index = read_checkpoint(folder, None)
    assert all(math.prod(tensor.shape) * tensor.item_bytes < 1 << 40 for tensor in index.tensors)
    return read_digests(index)


def dcp_metadata(chance: Random, folder: Path) -> str:
    """A DCP checkpoint with another `.metadata`."""
    source = chance.choice(_golden("dcp-2.13/*/*/.metadata"))
    case = Path(shutil.copytree(source.parent, folder / "case", dirs_exist_ok=True))
    data = source.read_bytes()
    change = chance.choice((mutate.pickle_edit, mutate.pickle_edit, mutate.splice))
    (case / ".metadata").write_bytes(change(data, chance))
    return _name_of(outcome_of(lambda: _all_bytes(case)))


def tampered(chance: Random, folder: Path) -> str:
    """A golden DeepSpeed checkpoint, one pickle edited and checksums made to fit, converted."""
    names = [name for name in checkpoints() if name.startswith("deepspeed")]
    path, topology = checkpoints()[chance.choice(names)]
    case = Path(shutil.copytree(path, folder / "case", dirs_exist_ok=True))
    victim = chance.choice(sorted(case.glob("*.pt")))
    old = pickle_of(victim)
    victim.write_bytes(mutate.replace_pickle(victim.read_bytes(), old, mutate.pickle_edit(old, chance)))
    return _name_of(run(case, folder / "out" / STEP, topology))


def damaged(chance: Random, folder: Path) -> str:
    """A golden checkpoint of any format, damaged anywhere, converted: the same result, or an error."""
    name = chance.choice(sorted(checkpoints()))
    path, topology = checkpoints()[name]
    case = Path(shutil.copytree(path, folder / "case", dirs_exist_ok=True))
    victim = chance.choice(sorted(item for item in case.iterdir() if item.is_file() and item.name not in UNPROTECTED))
    data = victim.read_bytes()
    changed = chance.choice((mutate.flip, mutate.flip, mutate.splice))(data, chance)
    if victim.suffix in (".pt", ".distcp") and chance.random() < 0.4:
        changed = mutate.zip_fields(data, chance)
    victim.write_bytes(changed)
    result = run(case, folder / "out" / STEP, topology)
    if not isinstance(result, ReshardError):
        assert not protected(victim.name) or result == undamaged(name), f"{victim.name} was damaged, and nobody noticed"
    return _name_of(result, result == undamaged(name))


UNPROTECTED = frozenset(("latest",))


def protected(name: str) -> bool:
    """The container itself has checksums; the others are protected by COMMIT.json alone."""
    return name.endswith((".pt", ".distcp"))


@functools.cache
def undamaged(name: str) -> Any:
    """Convert a golden checkpoint without damage."""
    import tempfile

    path, topology = checkpoints()[name]
    with tempfile.TemporaryDirectory() as folder:
        return run(path, Path(folder) / "out" / STEP, topology)


def run(source: Path, target: Path, topology: Topology, *, target_format: str = "") -> Any:
    """Convert; the source is untouched, the target appears complete or not at all, and nothing else is left."""
    before = state_of(source)
    result = outcome_of(
        lambda: convert(
            Conversion(source=source, target=target, topology=topology, target_format=target_format),
            RunOptions(num_threads=1, sync=False),
        )
    )
    assert state_of(source) == before, "the source was changed"
    left = sorted(path.name for path in target.parent.iterdir()) if target.parent.exists() else []
    if isinstance(result, ReshardError):
        assert not left, f"left behind: {left}"
        return result
    assert left == [target.name]
    found = read_commit(target)
    check_files(target, found, crc=True)
    check_commit(found)
    own = [
        f
        for f in found.files
        if found.format not in ("dcp", "megatron") or not f.path.endswith((".distcp", ".metadata"))
    ]
    items = _items(target) if found.format in ("dcp", "megatron") else ()
    files = (*((f.path, f.num_bytes, f.crc32) for f in own), *items)
    return found.format, found.step, found.samples, found.topology, files, tuple(sorted(found.digests.items()))


def _items(folder: Path) -> tuple[Any, ...]:
    """Read the items of a DCP checkpoint: unused bytes of their archives travel as they are."""
    found = []
    for entry in read_metadata(folder):
        for box, place in entry.chunks:
            with open_file(folder / place.file) as file:
                window = Window(file, place.offset, place.length, entry.key)
                members = [m for name, m in sorted(read_directory(window).items()) if name.startswith("data")]
                found += [(entry.key, box, m.name, file.read(m.num_bytes, m.offset)) for m in members]
    return tuple(found)


TARGETS: dict[str, Target] = {
    "pickle": pickle_machine,
    "archive": archive,
    "archive_pickle": archive_pickle,
    "commit": commit,
    "journal": journal,
    "safetensors": safetensors,
    "dcp_metadata": dcp_metadata,
    "tampered": tampered,
    "damaged": damaged,
}
