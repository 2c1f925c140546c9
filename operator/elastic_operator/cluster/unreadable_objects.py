"""Objects of the cluster that cannot be read: each is set aside and told once, alone. Nothing else waits for it."""

from __future__ import annotations

import logging

from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import Sample

_MOST_KNOWN = 4096

_told: dict[tuple[str, str, str], str] = {}
"""What was wrong with an object when it was told of, by kind, namespace and name."""

logger = logging.getLogger(__name__)


def tell(kind: str, key: tuple[str, str], version: str, error: Exception) -> None:
    """Log and count an object that cannot be read, once for what is wrong with it.

    Args:
        kind: plural of the kind, for instance `pods`.
        key: namespace (empty for an object of the cluster) and name.
        version: its resourceVersion, for whoever looks it up.
    """
    said = f"{type(error).__name__}: {error}"[:200]
    if _told.get((kind, *key)) == said:
        return
    _told[kind, *key] = said
    while len(_told) > _MOST_KNOWN:
        del _told[next(iter(_told))]
    name = "/".join(part for part in key if part)
    logger.warning(
        "%s %s (resourceVersion %s) cannot be read and is left out: %s; correct or delete it",
        kind, name, version, ascii(said),
    )  # fmt: skip
    exporter.count([Sample(family=definitions.UNREADABLE, labels=(kind,))])


def settled(kind: str, key: tuple[str, str]) -> None:
    """Forget what was told of an object that is gone, or can be read again."""
    _told.pop((kind, *key), None)
