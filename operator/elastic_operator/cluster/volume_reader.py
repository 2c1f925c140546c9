"""Reads the claims of training pods, and the volumes or classes that say which nodes reach them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from elastic_operator.api.spec import SpecError
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import AnswerError, ApiError, RequestError
from elastic_operator.client.resources import CLAIM, STORAGE_CLASS, VOLUME, ResourceKind
from elastic_operator.cluster import unreadable_objects
from elastic_operator.observed.placement.volumes import (
    ClaimView,
    bound_claim,
    class_name,
    list_claims,
    read_claim,
    unbound_claim,
    volume_name,
)
from elastic_operator.reconcile.record import Record

CLAIM_SECONDS = 60.0
"""Maximum age of a claim with a volume while an attempt runs."""

CLASS_SECONDS = 60.0
"""Time for which a StorageClass counts as known; administrators rarely change one."""

VOLUME_SECONDS = 600.0
"""Time for which a bound volume counts as known; the API server lets nobody change its node affinity."""

MAX_KNOWN = 16_384
"""Maximum number of objects that are kept, oldest out first."""

_K = TypeVar("_K")
_V = TypeVar("_V")

logger = logging.getLogger(__name__)


class _UnknownError(Exception):
    """An object could not be read, so it restricts nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Result of reading a claim.

    Attributes:
        view: None if the claim cannot be read.
        time: when it was read, by the monotonic clock.
        is_settled: False if the claim is about to get a volume, or has a problem that somebody may correct.
    """

    view: ClaimView | None
    time: float
    is_settled: bool


class VolumeReader:
    """Reads the claims of jobs; an object that cannot be read restricts nothing.

    Jobs share what was read: a thousand jobs with the same claim cause one request.
    """

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._claims: dict[tuple[str, str], _Known] = {}
        self._objects: dict[tuple[str, str, str], tuple[Mapping[str, Any], float]] = {}
        self._forbidden: set[str] = set()

    def known_claims(self, record: Record) -> tuple[ClaimView, ...]:
        """Return the last known claims of a job without any request."""
        known = [self._claims.get((record.job.namespace, name)) for name in _names(record)]
        return tuple(item.view for item in known if item is not None and item.view is not None)

    async def read_claims(self, record: Record, *, fresh: bool) -> tuple[ClaimView, ...]:
        """Return the claims of a job.

        Args:
            record: the resource.
            fresh: True if an attempt is about to be planned; else claims with a volume may be CLAIM_SECONDS old.
        """
        namespace, now = record.job.namespace, time.monotonic()
        for name in _names(record):
            known = self._claims.get((namespace, name))
            if fresh or known is None or not known.is_settled or now - known.time > CLAIM_SECONDS:
                view, is_settled = await self._read_claim(namespace, name)
                _keep(self._claims, (namespace, name), _Known(view=view, time=now, is_settled=is_settled))
        return self.known_claims(record)

    async def _read_claim(self, namespace: str, name: str) -> tuple[ClaimView | None, bool]:
        """Return the view of a claim, None if it cannot be read, and whether it will stay as it is."""
        claim: Mapping[str, Any] = {}
        try:
            claim = await self._get(CLAIM, name, namespace)
            view, needed = read_claim(name, claim or None)
            if view is not None:
                return view, False
            if needed == "class":
                return unbound_claim(
                    claim, await self._find(STORAGE_CLASS, class_name(claim), "", CLASS_SECONDS)
                ), False
            uid = str(claim["metadata"].get("uid") or "")
            volume = await self._find(VOLUME, volume_name(claim), uid, VOLUME_SECONDS)
            return bound_claim(claim, volume or None), True
        except _UnknownError:
            return None, True
        except ValueError as error:
            version = str(claim["metadata"].get("resourceVersion") or "")
            unreadable_objects.report(CLAIM.plural, (namespace, name), version, error)
            return None, True

    async def _find(self, kind: ResourceKind, name: str, owner: str, seconds: float) -> Mapping[str, Any] | None:
        """Return a cluster-scoped object, as it was read in the last `seconds` for the same owner.

        Returns an empty object if there is none, and None if it cannot be read.
        """
        now, key = time.monotonic(), (kind.plural, name, owner)
        known = self._objects.get(key)
        if known is not None and now - known[1] < seconds:
            return known[0]
        try:
            found = await self._get(kind, name)
        except _UnknownError:
            return None
        if found:
            _keep(self._objects, key, (found, now))
        return found

    async def _get(self, kind: ResourceKind, name: str, namespace: str = "") -> Mapping[str, Any]:
        """Read one object; return an empty one if the API server says that there is none.

        Raises:
            _UnknownError: it cannot be read.
        """
        try:
            return await self._client.get(kind, name, namespace=namespace)
        except RequestError as error:
            if isinstance(error, ApiError) and error.code == HTTPStatus.NOT_FOUND:
                return {}
            if isinstance(error, AnswerError) and error.code == HTTPStatus.FORBIDDEN:
                self._warn_forbidden(kind, error)
            else:
                logger.debug("%s %s cannot be read and restricts no nodes: %s", kind.kind, name, error)
            raise _UnknownError from error

    def _warn_forbidden(self, kind: ResourceKind, error: AnswerError) -> None:
        if kind.plural not in self._forbidden:
            self._forbidden.add(kind.plural)
            logger.warning(
                "all nodes count as reaching the volumes of jobs: %s; grant the operator get of %s", error, kind.plural
            )


def _names(record: Record) -> tuple[str, ...]:
    spec = record.spec
    return () if isinstance(spec, SpecError) else list_claims(spec.checkpoint.claim_name, spec.template)


def _keep(table: dict[_K, _V], key: _K, value: _V) -> None:
    """Store a value as the newest one, and drop the oldest ones beyond MAX_KNOWN."""
    table.pop(key, None)
    table[key] = value
    while len(table) > MAX_KNOWN:
        del table[next(iter(table))]
