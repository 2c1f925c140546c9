"""Ranges of objects are fetched together: large ones in parts, and whatever fails is named."""

from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import pytest

from reshard.errors import CorruptSourceError, StoreError
from reshard.storage import object_store
from reshard.storage.object_store import REQUESTS, RemoteFile, RemotePath, fetch_ranges
from reshard.storage.source_reader import SourceReader
from reshard.tensors.layout import SourceFile

CONTENT = np.arange(1000, dtype=np.uint8).tobytes()


@pytest.fixture
def objects() -> Iterator[tuple[RemotePath, list[RemoteFile]]]:
    store = fsspec.filesystem("memory")
    root = RemotePath("memory://fetch-ranges")
    for name in ("a", "b"):
        store.pipe(f"{root}/{name}", name.encode() + CONTENT)
    yield root, [(root / name).open_remote() for name in ("a", "b")]
    store.rm(str(root), recursive=True)


def test_each_range_has_its_content_and_large_ones_are_fetched_in_parts(objects, monkeypatch):
    _, (first, second) = objects
    monkeypatch.setattr(object_store, "_REQUEST_BYTES", 100)
    before = REQUESTS.count
    found = fetch_ranges([(first, 1, 251), (second, 0, 1), (second, 5, 5), (first, 990, 2000)])
    assert found == [CONTENT[:250], b"b", b"", CONTENT[989:]]
    assert REQUESTS.count - before == 3 + 1 + 0 + 11


def test_no_ranges_are_no_requests(objects):
    before = REQUESTS.count
    assert fetch_ranges([]) == []
    assert fetch_ranges([(objects[1][0], 7, 7)]) == [b""]
    assert REQUESTS.count == before


@pytest.mark.parametrize("raised", [True, False], ids=["raised", "returned"])
def test_a_request_that_fails_names_its_object(objects, raised, monkeypatch):
    root, (first, second) = objects

    def cat_ranges(paths: list[str], *_: Any, **__: Any) -> list[Any]:
        error = PermissionError("403")
        if raised:
            raise error
        return [b"x" if path.endswith("/a") else error for path in paths]

    monkeypatch.setattr(
        type(root.filesystem()), "cat_ranges", lambda _self, *given, **named: cat_ranges(*given, **named)
    )
    with pytest.raises(StoreError) as error:
        fetch_ranges([(first, 0, 1), (second, 0, 1)])
    assert "403" in str(error.value)
    assert f"fetch-ranges/{'a' if raised else 'b'}" in str(error.value)


def test_an_object_that_became_shorter_is_named_with_what_is_missing(objects):
    root, _ = objects
    reader = SourceReader(root, [SourceFile(path="a", num_bytes=1201)])
    with pytest.raises(
        CorruptSourceError, match="ends at byte 1001, 199 more bytes were expected there: truncated"
    ) as e:
        reader.prefetch([(0, 900, 1200)])
    assert e.value.path == f"{root}/a"
