"""Open the files of torch.save for a stranger, and add their storages to the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.witness.archives import Archive
from reshard.witness.pickles import StoredTensor
from reshard.witness.table import Piece, Storage, Table, Tensor


class OpenedFile:
    """A file of torch.save.

    Args:
        table: that file and storages are added to.
        name: path of the file, relative to the checkpoint's folder.
        is_target: every byte of the file will be accounted for.
        start: first byte of the archive in the file.
        num_bytes: length of the archive; None for the rest of the file.
        number: of the file in the table; None to add the file.
    """

    def __init__(
        self, table: Table, name: str, *, is_target: bool, start: int = 0, num_bytes: int | None = None,
        number: int | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._archive = Archive(table.root / name, start=start, num_bytes=num_bytes)
        self.value: Any = table.pickles.load(self._archive.pickle)
        self._number = table.add_file(name) if number is None else number
        self._table = table
        self._storages: dict[str, Storage] = {}
        self._typed: set[str] = set()
        if is_target:
            table.filler.setdefault(self._number, []).extend(self._archive.gaps())
            for entry in self._archive.entries:
                if entry.startswith("data/"):
                    self._add_storage(entry.removeprefix("data/"), "uint8")

    def _add_storage(self, key: str, dtype: str) -> Storage:
        storage = Storage(self._number, lambda: self._archive.find_storage(key), dtype)
        self._storages[key] = storage
        self._table.storages.append(storage)
        return storage

    def storage_of(self, tensor: StoredTensor) -> Storage:
        """Return the storage of a tensor; the same object for tensors that share one."""
        key = tensor.storage.key
        storage = self._storages.get(key) or self._add_storage(key, tensor.dtype)
        if key not in self._typed:
            storage.dtype = tensor.dtype
            self._typed.add(key)
        return storage if storage.dtype == tensor.dtype else self._add_storage(key, tensor.dtype)

    def piece_of(self, tensor: StoredTensor) -> Piece:
        """Return the one piece of a tensor that the file holds whole."""
        zero = (0,) * len(tensor.shape)
        return Piece(zero, tensor.shape, self.storage_of(tensor), tensor.offset, tensor.stride, tensor.shape)

    def tensor_of(self, tensor: StoredTensor) -> Tensor:
        """Return a tensor that the file holds whole."""
        return Tensor(tensor.shape, tensor.dtype, [[self.piece_of(tensor)]])

    def find(self, *path: Any) -> Any:
        """Return what is at a path of keys in the file's value, or None."""
        here = self.value
        for key in path:
            here = here.get(key) if isinstance(here, Mapping) else None
        return here
