"""Results of saving functions that are still under way, such as that of torch's `dcp.async_save`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def when_done(result: object, tell: Callable[[str], None]) -> None:
    """Call `tell` with an error, or an empty text, when a save is done; at once if `result` is no future.

    `result` may be a future of torch or of `concurrent.futures`, or torch's AsyncSaveResponse, which has one for the
    copy of the tensors and one for the save. The training may change tensors only after the copy, so the function
    waits for that.
    """
    staged = getattr(result, "staging_completion", None)
    if staged is not None:
        _outcome(staged)
        result = getattr(result, "upload_completion", None)
    add = getattr(result, "add_done_callback", None)
    if add is None:
        tell("")
        return
    add(lambda done: tell(_error_of(done)))


def wait(result: object) -> None:
    """Wait until a save is done; return at once if `result` is no future. Raises what the save has raised."""
    result = getattr(result, "upload_completion", result)
    if hasattr(result, "add_done_callback"):
        _outcome(result)


def _outcome(future: Any) -> None:
    """Wait for a future; raise its exception."""
    (future.result if hasattr(future, "result") else future.wait)()


def _error_of(future: Any) -> str:
    try:
        _outcome(future)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""
