"""Items that are like one that was taken apart are located as if each was; damage to them means what it means alone."""

import shutil
from pathlib import Path

import pytest

from reshard.errors import ReshardError
from reshard.formats.dcp.items import Chunk, Items
from reshard.formats.dcp.metadata import Entry, Place, read_metadata
from reshard.tensors.geometry import Box
from tests.golden.dcp_files import golden

Item = tuple[Entry, Box, Place]


def tensors(folder: Path) -> list[Item]:
    return [
        (entry, box, place)
        for entry in read_metadata(folder)
        if entry.is_tensor
        for box, place in entry.chunks
        if box is not None and box.num_elements
    ]


def alone(folder: Path, item: Item) -> Chunk | str:
    """Return the position of an item that is read first, or the error."""
    return after(folder, [item])


def after(folder: Path, items: list[Item]) -> Chunk | str:
    """Return the position of the last item, read after the others, or the error."""
    with Items(folder) as found:
        try:
            return [found.chunk(*item) for item in items][-1]
        except ReshardError as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", ["fsdp2-flat", "tp2-fsdp2-titan"])
def test_items_are_located_as_if_each_was_taken_apart(name):
    folder = golden(name)
    every = tensors(folder)
    with Items(folder) as items:
        together = [items.chunk(*item) for item in every]
    assert together == [alone(folder, item) for item in every]
    assert len({(item[0].dtype, item[1].size, item[2].length) for item in every}) < len(every) / 2


def test_a_flipped_bit_means_what_it_means_alone(tmp_path):
    folder = Path(shutil.copytree(golden("fsdp2-flat"), tmp_path / "copy"))
    every = tensors(folder)
    last = every[-1]
    like = next(item for item in every if item[2].length == last[2].length and item[1].size == last[1].size)
    assert like is not last
    path = folder / last[2].file
    original = path.read_bytes()
    different = 0
    unharmed = alone(folder, last)
    for position in range(last[2].offset, last[2].offset + last[2].length, 3):
        content = bytearray(original)
        content[position] ^= 1 << position % 8
        path.write_bytes(content)
        found = alone(folder, last)
        assert found == after(folder, [like, last])
        different += found != unharmed
    assert different > 100
