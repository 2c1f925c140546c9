"""Leader election with a Lease, before anything else starts. A process that loses the Lease exits at once.

Times are client-go's defaults: a leader renews every 2 s and exits after 10 s without success. A candidate takes over
when the Lease has not changed for 15 s by the candidate's own clock.

A process that was paused does not notice the pause. Therefore every write calls `must_lead` first: it reads the
monotonic clock and exits if another leader may have taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NoReturn

from elastic_operator.api.serialization import format_time
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError, RequestError
from elastic_operator.client.resources import LEASE
from elastic_operator.cluster.caches import RenewalCache
from elastic_operator.cluster.own_account import review_account
from reshard.contract import GROUP

LEASE_SECONDS = 15.0
GIVE_UP_SECONDS = 10.0
RETRY_SECONDS = 2.0
EXIT_NOT_LEADER = 70
"""Exit code of a process that is no longer the leader (EX_SOFTWARE)."""

NOTIFIED_UNTIL = f"{GROUP}/notified-until"
"""Annotation of the Lease: the time up to which the leader has sent all notifications (`webhook.outbox`)."""

STATUS_PAGE = f"{GROUP}/status-page"
"""Annotation of the Lease: IP address and port of the leader's status page; missing if it serves none."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CandidateState:
    """State of one candidate.

    Attributes:
        is_leading: the candidate holds the Lease.
        holder: the holder when the Lease was last read; empty for none.
        trouble: why the last request for the Lease failed; empty if it did not.
        age_seconds: time since this candidate started its last successful renewal.
    """

    is_leading: bool
    holder: str = ""
    trouble: str = ""
    age_seconds: float = 0.0


class Leader:
    """One candidate.

    Attributes:
        failed_at: when a request for the Lease last failed; None for never.
        notified_until: the last leader's value of the annotation NOTIFIED_UNTIL; empty for none.
        page_address: value of the annotation STATUS_PAGE while this process leads; empty for none.
        leader_page: the leader's value of that annotation when the Lease was last read; empty for none.
        get_mark: returns the value of that annotation for the next renewal, empty for none; None to keep what is there.
    """

    def __init__(self, client: KubernetesClient, namespace: str, identity: str, *, name: str) -> None:
        self._leading = False
        self.failed_at: float | None = None
        self.notified_until = ""
        self.page_address = self.leader_page = ""
        self.get_mark: Callable[[], str] | None = None
        self._holder = ""
        self._trouble = "the Lease has not been read yet"
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._renewals = RenewalCache()
        self._renewed = 0.0
        self._expires = 0.0
        self._owners: list[dict[str, Any]] = []

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        logger.info("waiting to become the leader (Lease %s/%s)", self._namespace, self._name)
        self._owners = await self._lease_owners()
        while not await self._attempt():
            # Wake up when the current Lease expires: the leader may be dead.
            await asyncio.sleep(min(RETRY_SECONDS, max(0.1, self._expires - time.monotonic())))
        self._leading = True
        logger.info("this process is the leader: %s", self._identity)

    async def hold(self) -> None:
        """Renew the Lease forever; exit if renewals fail for so long that another process may have become leader."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            self.must_lead()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVE_UP_SECONDS - self._age_seconds):
                    await self._attempt()
            self.must_lead()

    def must_lead(self) -> None:
        """Exit unless this process is certainly the leader; called before every write."""
        if self._age_seconds > GIVE_UP_SECONDS:
            self._give_up(f"the Lease was last renewed {self._age_seconds:.1f} s ago ({self._trouble or 'paused'})")

    @property
    def state(self) -> CandidateState:
        """State of this candidate, for the probes and the metrics."""
        return CandidateState(
            is_leading=self._leading, holder=self._holder, trouble=self._trouble, age_seconds=self._age_seconds
        )

    @property
    def _age_seconds(self) -> float:
        return time.monotonic() - self._renewed

    async def release(self) -> None:
        """Clear the holder of the Lease, so that the next leader need not wait until it expires."""
        with contextlib.suppress(RequestError):
            lease = await self._read()
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                await self._write(lease, holder="")

    async def _attempt(self) -> bool:
        """Take or renew the Lease; return False if another process holds it or the request fails."""
        start = time.monotonic()
        try:
            is_taken = await self._take()
        except RequestError as error:
            self.failed_at = time.time()
            self._trouble = f"{type(error).__name__}: {error}"
            logger.warning("leader election: Lease %s/%s: %s", self._namespace, self._name, self._trouble)
            return False
        self._trouble = ""
        if is_taken:
            self._renewed = start
        return is_taken

    async def _take(self) -> bool:
        lease = await self._read()
        if lease is None:
            return await self._create()
        spec = lease.get("spec") or {}
        self.leader_page = str((lease["metadata"].get("annotations") or {}).get(STATUS_PAGE) or "")[:64]
        self._holder = spec.get("holderIdentity") or ""
        last_change = self._renewals.first_seen(self._name, f"{self._holder} {spec.get('renewTime')}", time.monotonic())
        self._expires = last_change + LEASE_SECONDS
        if self._holder == self._identity:
            return await self._write(lease, holder=self._identity)
        if self._leading:
            self._give_up(f"{self._holder or 'nobody'} holds the Lease")
        if self._holder and time.monotonic() < self._expires:
            return False
        return await self._write(lease, holder=self._identity)

    def _give_up(self, reason: str) -> NoReturn:
        logger.error("this process is not the leader any more: %s: exiting at once", reason)
        os._exit(EXIT_NOT_LEADER)

    async def _lease_owners(self) -> list[dict[str, Any]]:
        """Return the ownerReferences of the Lease: this process's ServiceAccount, if it is in the Lease's namespace.

        Kubernetes then deletes the Lease together with the account, so that uninstalling the operator leaves no Lease.
        """
        try:
            account = await review_account(self._client)
        except RequestError as error:
            logger.warning("the ServiceAccount of this process is unknown, so its Lease gets no owner: %s", error)
            return []
        if account is None or account.namespace != self._namespace or not account.uid:
            return []
        return [{"apiVersion": "v1", "kind": "ServiceAccount", "name": account.name, "uid": account.uid}]

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._client.get(LEASE, self._name, namespace=self._namespace)
        except ApiError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def _create(self) -> bool:
        meta = {"name": self._name, "namespace": self._namespace, "ownerReferences": self._owners}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": self._spec(self._identity),
        }
        return await self._try_write(self._client.create(LEASE, body))

    async def _write(self, lease: dict[str, Any], *, holder: str) -> bool:
        # The write includes the resourceVersion that was read, so only one of two candidates succeeds.
        lease["spec"] = {**(lease.get("spec") or {}), **self._spec(holder)}
        notes = lease["metadata"].get("annotations") or {}
        if not self._leading:
            self.notified_until = notes.get(NOTIFIED_UNTIL) or ""
        if self.get_mark is not None:
            mark = self.get_mark()
            others = {key: value for key, value in notes.items() if key != NOTIFIED_UNTIL}
            notes = {**others, NOTIFIED_UNTIL: mark} if mark else others
        if self.page_address or STATUS_PAGE in notes:
            others = {key: value for key, value in notes.items() if key != STATUS_PAGE}
            notes = {**others, STATUS_PAGE: self.page_address} if self.page_address and holder else others
        lease["metadata"] = {**lease["metadata"], "ownerReferences": self._owners, "annotations": notes}
        return await self._try_write(self._client.replace(LEASE, lease))

    def _spec(self, holder: str) -> dict[str, Any]:
        renew_time = format_time(time.time())[:-1] + "000Z"
        return {"holderIdentity": holder, "leaseDurationSeconds": int(LEASE_SECONDS), "renewTime": renew_time}

    @staticmethod
    async def _try_write(call: Awaitable[object]) -> bool:
        try:
            await call
        except ApiError as error:
            if error.code == HTTPStatus.CONFLICT:
                return False
            raise
        return True
