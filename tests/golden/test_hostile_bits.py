"""One flipped bit anywhere, and a cut at every structure's boundary: an error that names the file, or proven harmless.

Of a `.pt` file, a bit is *harmless* if everything that is taken from the file stays the same: the object tree, and
place, length and stated checksum of every storage. A changed stated checksum, or a changed byte of a storage, is found
when the storage is read (`test_every_storage_is_checked_against_its_sum`).
"""

import collections
import random
import re
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.commits.commit import read_commit
from reshard.errors import CorruptSourceError, ReshardError
from reshard.formats.pt.reader import read
from tests.fuzz.guard import check_error
from tests.fuzz.mutate import ZIP_FIELDS, zip_records
from tests.fuzz.targets import GOLDEN, STEP, checkpoints, run, undamaged
from tests.randomness import examples

FILES = sorted(path for path in GOLDEN.glob("deepspeed-0.19.8/*/*/*.pt"))
CHOSEN = [FILES[at] for at in range(0, len(FILES), max(1, len(FILES) // 6))]

KINDS = {b"PK\3\4": "local", b"PK\1\2": "directory", b"PK\5\6": "end", b"PK\6\6": "end64", b"PK\6\7": "locator"}
HARMLESS = {
    # Field -> why nothing is taken from it (docs/verification.md has the same list for people).
    "local+4", "local+6", "local+8", "local+10", "local+12", "local+14", "local+18", "local+22",
    "local+26", "local+28",  # of entries that are empty or not used: elsewhere the payload moves, and its sum tells
    "local name or padding", "payload of an entry that is not used", "data descriptor",
    "directory+4", "directory+6", "directory+8", "directory+12", "directory+14", "directory+34", "directory+36",
    "directory+38", "directory+30", "directory+32", "directory+16", "directory+20", "directory+24", "directory+28",
    "directory name", "directory+42",
    "end+4", "end+6", "end+8", "end+10", "end+12", "end+16", "end+20",
    "end64+4", "end64+12", "end64+14", "end64+16", "end64+20", "end64+24", "end64+32", "locator+4", "locator+8",
    "locator+16",
}  # fmt: skip


def meaning(path: Path) -> tuple[object, bool]:
    """Everything that is taken from the file: the object tree and the storages' bytes; and whether all sums fit."""
    found, content = read(path), path.read_bytes()
    storages, fit = {}, True
    for key, item in found.storages.items():
        data = content[item.file_offset : item.file_offset + item.num_bytes]
        storages[key] = (item.dtype, item.num_elements, data)
        fit = fit and zlib.crc32(data) == item.crc32
    return (flat(found.value), storages), fit


def flat(value) -> object:
    if hasattr(value, "storage"):
        return ("tensor", value.shape, value.stride, value.offset, value.dtype)
    if hasattr(value, "target"):
        return (str(value.target), flat(value.args), flat(value.state), flat(value.items), flat(value.pairs))
    if isinstance(value, dict):
        return [(str(key), flat(item)) for key, item in value.items()]
    return [flat(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def fields(content: bytes, used: list[tuple[int, int]]) -> list[str]:
    """Label each byte of an archive."""
    labels = [""] * len(content)
    for start, length in used:
        labels[start : start + length] = ["used payload"] * length
    for signature, at in zip_records(content):
        if labels[at]:
            continue
        kind, end = KINDS[signature], at
        for offset, length in ZIP_FIELDS[signature]:
            labels[at + offset : at + offset + length] = [f"{kind}+{offset}"] * length
            end = at + offset + length
        name = int.from_bytes(content[at + 26 : at + 28], "little") if kind == "local" else 0
        extra = int.from_bytes(content[at + 28 : at + 30], "little") if kind == "local" else 0
        if kind == "directory":
            name = int.from_bytes(content[at + 28 : at + 30], "little")
        if name:
            label = "local name or padding" if kind == "local" else "directory name"
            labels[end : end + name + extra] = [label] * (name + extra)
    return [label or "payload of an entry that is not used" for label in labels]


def used(path: Path) -> list[tuple[int, int]]:
    found = [(item.file_offset, item.num_bytes) for item in read(path).storages.values()]
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith("/data.pkl"):
                at = info.header_offset
                names = int.from_bytes(content[at + 26 : at + 28], "little")
                extra = int.from_bytes(content[at + 28 : at + 30], "little")
                found.append((at + 30 + names + extra, info.file_size))
    return found


@pytest.mark.parametrize("path", CHOSEN, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_flipped_bit_of_a_pt_file_is_named_or_harmless(path, tmp_path):
    content, copy, chance = path.read_bytes(), tmp_path / path.name, random.Random(path.name)
    wanted, labels = meaning(path), fields(content, used(path))
    structure = [at for at, label in enumerate(labels) if label != "used payload"]
    payload = [at for at, label in enumerate(labels) if label == "used payload"]
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    num_flips = min(examples(200, soak=7000), len(structure)), min(examples(40, soak=1000), len(payload))
    for at in (*chance.sample(structure, num_flips[0]), *chance.sample(payload, num_flips[1])):
        changed = bytearray(content)
        changed[at] ^= 1 << chance.randrange(8)
        copy.write_bytes(changed)
        try:
            found = meaning(copy)
        except ReshardError as error:
            check_error(error)
            assert copy.name in str(error)
            outcomes[labels[at]]["named"] += 1
            continue
        if not found[1]:
            outcomes[labels[at]]["named when its tensor is read"] += 1
        else:
            assert found[0] == wanted[0], f"byte {at} ({labels[at]}) changed what is read, and nobody noticed"
            outcomes[labels[at]]["harmless"] += 1
    harmless = {label for label, counts in outcomes.items() if counts["harmless"]}
    assert harmless - {"used payload"} <= HARMLESS, harmless - HARMLESS
    assert sum(counts["named"] for counts in outcomes.values()) > 50


def test_every_storage_is_checked_against_its_sum(tmp_path):
    """Storages of all files of two checkpoints: one bit flipped, and the file is named, or the storage is not used."""
    refused = 0
    for name in ("deepspeed-0.19.8/bf16-dp2/step-00000002", "deepspeed-0.19.8/zero3-dp3/step-00000002"):
        source, topology = checkpoints()[name]
        folder = Path(shutil.copytree(source, tmp_path / source.parent.name))
        chance = random.Random(1)
        for path in sorted(folder.glob("*.pt")):
            content = path.read_bytes()
            storages = [item for item in read(path).storages.values() if item.num_bytes]
            for storage in chance.sample(storages, min(3, len(storages))):
                changed = bytearray(content)
                changed[storage.file_offset + chance.randrange(storage.num_bytes)] ^= 1 << chance.randrange(8)
                path.write_bytes(changed)
                result = run(folder, tmp_path / f"out{refused}" / STEP, topology)
                if isinstance(result, ReshardError):  # another copy is taken where there are several
                    assert isinstance(result, CorruptSourceError)
                    assert path.name in str(result)
                    refused += 1
                else:
                    assert result == undamaged(name)
                    shutil.rmtree(tmp_path / f"out{refused}")
            path.write_bytes(content)
    assert refused > 10


@pytest.mark.parametrize("path", CHOSEN, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_file_cut_at_any_boundary_is_refused_and_named(path, tmp_path):
    content, copy = path.read_bytes(), tmp_path / path.name
    edges = {0, 1, 4, len(content) - 1, len(content) - 22, len(content) - 21}
    for _, at in zip_records(content):
        edges |= {at - 1, at, at + 1, at + 4, at + 30}
    for start, length in used(path):
        edges |= {start, start + 1, start + length - 1, start + length}
    for edge in sorted(edge for edge in edges if 0 <= edge < len(content)):
        copy.write_bytes(content[:edge])
        with pytest.raises(CorruptSourceError, match=re.escape(copy.name)):
            read(copy)


def test_a_flipped_bit_in_any_byte_of_a_marker_is_refused(tmp_path):
    source, topology = checkpoints()["deepspeed-0.19.8/zero2-dp3/step-00000002"]
    wanted = Conversion(source=source, target=tmp_path / "c", topology=topology, attempt=3)
    convert(wanted, RunOptions(num_threads=1, sync=False))
    path = tmp_path / "c" / "COMMIT.json"
    content, chance = path.read_bytes(), random.Random(2)
    assert len(content) > 1500
    for at in range(len(content)):
        for bit in chance.sample(range(8), examples(1, soak=8)):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(CorruptSourceError, match=r"COMMIT\.json") as refused:
                read_commit(tmp_path / "c")
            check_error(refused.value)
    path.write_bytes(content)
    assert read_commit(tmp_path / "c").attempt == 3
