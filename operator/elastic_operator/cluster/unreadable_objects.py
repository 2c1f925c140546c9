"""Reports of objects that cannot be read: each object is logged and counted once per error, and is ignored."""

from __future__ import annotations

import logging

from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import Sample

_MOST_KNOWN = 4096

_reported: dict[tuple[str, str, str], str] = {}
"""The last reported error of an object, by kind, namespace and name."""

logger = logging.getLogger(__name__)


def report(kind: str, key: tuple[str, str], version: str, error: Exception) -> None:
    """Log and count an object that cannot be read, unless the same error was already reported for it.

    Args:
        kind: plural of the kind, for instance `pods`.
        key: namespace (empty for a cluster-scoped object) and name.
        version: its resourceVersion, for the log line.
        error: what went wrong.
    """
    reason = f"{type(error).__name__}: {error}"[:200]
    if _reported.get((kind, *key)) == reason:
        return
    _reported[kind, *key] = reason
    while len(_reported) > _MOST_KNOWN:
        del _reported[next(iter(_reported))]
    name = "/".join(part for part in key if part)
    logger.warning(
        "%s %s (resourceVersion %s) cannot be read and is left out: %s; correct or delete it",
        kind, name, version, ascii(reason),
    )  # fmt: skip
    exporter.count([Sample(definition=definitions.UNREADABLE, labels=(kind,))])


def clear(kind: str, key: tuple[str, str]) -> None:
    """Remove the reported error of an object that was deleted, or can be read again."""
    _reported.pop((kind, *key), None)
