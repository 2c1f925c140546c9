"""The golden DCP checkpoints and what tests do with them: convert, look into items, change `.metadata`."""

import copy
import io
import shutil
import zipfile
from pathlib import Path

from reshard.execution.executor import Outcome, execute
from reshard.formats.base import Request
from reshard.formats.dcp import FORMAT
from reshard.formats.dcp.metadata import Entry, read_metadata
from reshard.formats.pt import machine
from reshard.formats.pt.emit import emit
from reshard.formats.pt.objects import Inert
from reshard.planning.check import check_plan
from reshard.planning.plan import make_plan
from reshard.tensors.layout import Index, TargetLayout
from reshard.topology import Topology
from tests.golden.files import any_name

ROOT = Path(__file__).parent / "dcp-2.13"
STEP = "step-00000002"
NAMES = ("fsdp2-flat", "single-nested", "tp2-fsdp2-titan")


def golden(name: str) -> Path:
    return ROOT / name / STEP


def convert(index: Index, target: Path, world: int, **request) -> tuple[TargetLayout, Outcome]:
    """Write `index` as DCP for `world` ranks, with all proofs."""
    layout = FORMAT.layout(index, Request(topology=Topology(dp=world, zero=3), **request))
    plan = make_plan(index, layout, num_threads=1)
    check_plan(plan)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    return layout, execute(plan, target, sync=False)


def items(folder: Path) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """Every item's bytes by key and offset of the chunk."""
    found = {}
    for entry in read_metadata(folder):
        for box, place in entry.chunks:
            content = (folder / place.file).read_bytes()[place.offset : place.offset + place.length]
            found[entry.key, () if box is None else box.offset] = content
    return found


def meaning(item: bytes) -> object:
    """Decode an item: every recipe, number and text, and the bytes of every storage."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}

    def storage(identifier):
        return ("storage", *identifier[1:2], *identifier[3:], files[f"data/{identifier[2]}"])

    def plain(value):
        if isinstance(value, Inert):
            return (value.kind, value.target, *map(plain, (value.args, value.state, value.items, value.pairs)))
        if isinstance(value, dict):
            return [type(value).__name__, *((key, plain(item)) for key, item in value.items())]
        return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value

    pickled, path = files["data.pkl"], "an item"
    machine_ = machine.Machine(pickled, storage, machine.rebuild_containers, path)
    return plain(machine_.run())


def check_archives(folder: Path) -> int:
    """Every item is a zip archive whose checksums hold, by the standard library's reading; how many there are."""
    found = items(folder)
    for key, content in found.items():
        assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None, key
    return len(found)


def entry(folder: Path, key: str) -> Entry:
    return next(item for item in read_metadata(folder) if item.key == key)


def edit_metadata(folder: Path, change) -> None:
    """Write `.metadata` again after `change` has been at its fields: recipes, as our machine reads them."""
    path = folder / ".metadata"
    root = machine.load(
        path.read_bytes(), persistent_load=lambda key: key, rebuild=machine.rebuild_containers, path=str(path)
    )
    change(root.state)
    with any_name():
        path.write_bytes(emit(root)[0])


def add_entries(folder: Path, names: dict[str, str]) -> None:
    """Add entries with the content of others: new name -> old name; a dot of a name ends a container."""

    def change(state) -> None:
        for new, old in names.items():
            state["state_dict_metadata"][new] = state["state_dict_metadata"][old]
            state["planner_data"][new] = tuple(new.split("."))
            index, info = next(pair for pair in state["storage_data"].items() if pair[0].state["fqn"] == old)
            renamed = copy.copy(index)
            renamed.state = {**index.state, "fqn": new}
            state["storage_data"][renamed] = info

    edit_metadata(folder, change)


def stored(state, key: str, at: int = 0) -> Inert:
    """The `_StorageInfo` of a chunk."""
    found = [info for index, info in state["storage_data"].items() if index.state["fqn"] == key]
    return found[at]


def chunks(state, key: str) -> list[Inert]:
    return state["state_dict_metadata"][key].state["chunks"]
