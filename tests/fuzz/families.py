"""Formats of several files in folders, damaged as a whole: universal, Megatron-Core and checkpoints with experts."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from reshard.errors import ReshardError
from reshard.topology import Topology
from tests.fuzz import mutate
from tests.fuzz.targets import GOLDEN, STEP, TARGETS, Target, pickle_of, protected, run


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A golden checkpoint, and what it is converted to."""

    path: str
    topology: str
    target_format: str = ""

    def convert(self, case: Path, folder: Path) -> Any:
        """Convert a copy of the source, which may be damaged."""
        return run(case, folder / "out" / STEP, Topology.parse(self.topology), target_format=self.target_format)


UNIVERSAL = (
    Source(f"universal-0.19.8/zero2-dp3/{STEP}", "dp=2,zero=1"),
    Source(f"universal-0.19.8/zero3-dp3/{STEP}", "dp=1,zero=2"),
    Source(f"universal-0.19.8/pipeline-tp2-pp2/{STEP}", "dp=2,zero=1", "dcp"),
    Source(f"universal-0.19.8/zero2-dp3/{STEP}", "zero=0", "safetensors"),
)
MEGATRON = (
    Source("megatron-0.16.1/iter_0000003", "dp=2", "dcp"),
    Source("megatron-0.16.1/iter_0000003", "zero=0", "safetensors"),
    Source("megatron-0.16.1/iter_0000003", "tp=4"),
)
EXPERTS = (
    Source(f"deepspeed-0.19.8/experts-dp4-ep2/{STEP}", "dp=2,ep=1,zero=1"),
    Source(f"deepspeed-0.19.8/experts-dp4-ep2/{STEP}", "dp=4,ep=4,zero=2"),
    Source(f"deepspeed-0.19.8/autoep-dp2-ep2/{STEP}", "dp=3,ep=1,zero=2"),
    Source(f"deepspeed-0.19.8/autoep-dp2-ep2/{STEP}", "zero=1", "universal"),
    Source(f"deepspeed-0.19.8/autoep-tp3-dp2-ep2-zero3/{STEP}", "tp=2,dp=2,ep=2,zero=3"),
)


def family(sources: tuple[Source, ...]) -> Target:
    """A target whose cases damage a copy of one of these."""

    def target(chance: Random, folder: Path) -> str:
        source = chance.choice(sources)
        case = Path(shutil.copytree(GOLDEN / source.path, folder / "case", dirs_exist_ok=True))
        files = sorted(path for path in case.rglob("*") if path.is_file())
        change = chance.choice((_damage, _damage, _tamper, _tamper, _tamper, _move))
        noticed = change(chance, chance.choice(files), files)
        result = source.convert(case, folder)
        same = not isinstance(result, ReshardError) and result == undamaged(source)
        if not isinstance(result, ReshardError):
            assert same or not noticed, "a file was damaged, and nobody noticed"
        return type(result).__name__ if isinstance(result, ReshardError) else "same" if same else "other"

    return target


def _damage(chance: Random, victim: Path, _files: list[Path]) -> bool:
    """Bits flipped, bytes lost, doubled or moved; a file that states its own checksums must tell."""
    data = victim.read_bytes()
    changed = chance.choice((mutate.flip, mutate.flip, mutate.splice))(data, chance)
    if protected(victim.name) and chance.random() < 0.4:
        changed = mutate.zip_fields(data, chance)
    victim.write_bytes(changed)
    return protected(victim.name)


def _tamper(chance: Random, victim: Path, _files: list[Path]) -> bool:
    """Another object in a file whose checksums fit."""
    data = victim.read_bytes()
    if victim.name.endswith(".json"):
        victim.write_bytes(mutate.json_edit(data, chance))
    elif victim.name == ".metadata":
        victim.write_bytes(mutate.pickle_edit(data, chance))
    elif victim.name.endswith(".pt"):
        old = pickle_of(victim)
        victim.write_bytes(mutate.replace_pickle(data, old, mutate.pickle_edit(old, chance)))
    else:
        victim.write_bytes(mutate.flip(data, chance))
        return protected(victim.name)
    return False


def _move(chance: Random, victim: Path, files: list[Path]) -> bool:
    """A file is missing, empty, in another's place, or there twice; a folder is missing or has another's name."""
    other, folder = chance.choice(files), victim.parent
    kind = chance.randrange(6)
    if kind == 0:
        victim.unlink()
    elif kind == 1:
        victim.write_bytes(b"")
    elif kind == 2:
        other.write_bytes(victim.read_bytes())
    elif kind == 3:
        (folder / chance.choice((f"{victim.name}.1", f"9{victim.name}", other.name))).write_bytes(victim.read_bytes())
    elif kind == 4:
        victim.rename(folder / chance.choice(("fp32.pt", "step.pt", "x", victim.stem + "9" + victim.suffix)))
    elif folder.name != "case":
        shutil.rmtree(folder) if chance.random() < 0.5 else folder.rename(folder.with_name(chance.choice(("..x", "w"))))
    return False


@functools.cache
def undamaged(source: Source) -> Any:
    """Convert the golden checkpoint without damage."""
    with tempfile.TemporaryDirectory() as folder:
        found = source.convert(GOLDEN / source.path, Path(folder))
    assert not isinstance(found, ReshardError), found
    return found


FAMILIES: dict[str, Target] = {
    "universal": family(UNIVERSAL),
    "megatron": family(MEGATRON),
    "experts": family(EXPERTS),
}

ALL: dict[str, Target] = {**TARGETS, **FAMILIES}
