"""How much may still be written, and what is done where a file system does not say it."""

from pathlib import Path

import pytest

from reshard.commits.staging import check_free
from reshard.errors import StorageFullError
from reshard.storage.target_writer import free_bytes


def test_a_file_system_without_a_size_has_no_known_free_space() -> None:
    assert free_bytes(Path("/proc")) is None
    check_free(Path("/proc"), 1 << 40)


def test_too_little_free_space_is_said_in_bytes(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    assert free is not None
    with pytest.raises(StorageFullError, match="are needed"):
        check_free(tmp_path, free + (1 << 50))
