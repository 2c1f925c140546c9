"""Leader election with a Lease, before anything else starts. Whoever loses the Lease ends the process at once.

Times are those of client-go's default: a leader renews every 2 s and gives up after 10 s without success; others take
over once a Lease has not changed for 15 s by their own clock.

A process that was paused does not know it when it goes on. So `must_lead` stands before every write: it looks at the
clock, which went on, and ends the process where another leader may have taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from http import HTTPStatus
from typing import Any, NoReturn

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError

from elastic_operator.api.serialization import format_time
from elastic_operator.cluster.caches import RenewalCache
from elastic_operator.cluster.own_account import reviewed
from elastic_operator.cluster.resources import LEASE, make

LEASE_SECONDS = 15.0
GIVE_UP_SECONDS = 10.0
RETRY_SECONDS = 2.0
LOST = 70
"""Exit code of a process that is not the leader any more (EX_SOFTWARE)."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How one candidate stands.

    Attributes:
        leading: it has the Lease.
        holder: who had it at the last look; empty for nobody.
        trouble: why the last look at the Lease failed; empty where it did not.
        age_seconds: time since the last renewal by this candidate was begun.
    """

    leading: bool
    holder: str = ""
    trouble: str = ""
    age_seconds: float = 0.0


class Leader:
    """One candidate."""

    def __init__(self, client: AsyncClient, namespace: str, identity: str, *, name: str) -> None:
        self._leading = False
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
        self._owners = await self._account()
        while not await self._attempt():
            # Not a moment longer than the Lease of a dead leader lasts.
            await asyncio.sleep(min(RETRY_SECONDS, max(0.1, self._expires - time.monotonic())))
        self._leading = True
        logger.info("this process is the leader: %s", self._identity)

    async def hold(self) -> None:
        """Renew for ever; the process ends where that fails for too long: there may be another leader by then."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            self.must_lead()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVE_UP_SECONDS - self._age_seconds):
                    await self._attempt()
            self.must_lead()

    def must_lead(self) -> None:
        """End the process unless it is certainly the leader: nothing may be written after that."""
        if self._age_seconds > GIVE_UP_SECONDS:
            self._give_up(f"the Lease was last renewed {self._age_seconds:.1f} s ago ({self._trouble or 'paused'})")

    @property
    def standing(self) -> Standing:
        """For those who ask."""
        return Standing(
            leading=self._leading, holder=self._holder, trouble=self._trouble, age_seconds=self._age_seconds
        )

    @property
    def _age_seconds(self) -> float:
        return time.monotonic() - self._renewed

    async def release(self) -> None:
        """Let the next one start without waiting."""
        with contextlib.suppress(ApiError, httpx2.HTTPError):
            lease = await self._read()
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                await self._write(lease, holder="")

    async def _attempt(self) -> bool:
        """Take or renew the Lease; False if it is somebody else's or cannot be reached."""
        begun = time.monotonic()
        try:
            taken = await self._take()
        except (ApiError, httpx2.HTTPError) as error:
            self._trouble = f"{type(error).__name__}: {error}"
            logger.warning("leader election: Lease %s/%s: %s", self._namespace, self._name, self._trouble)
            return False
        self._trouble = ""
        if taken:
            self._renewed = begun
        return taken

    async def _take(self) -> bool:
        lease = await self._read()
        if lease is None:
            return await self._create()
        spec = lease.get("spec") or {}
        self._holder = spec.get("holderIdentity") or ""
        seen = self._renewals.seen(self._name, f"{self._holder} {spec.get('renewTime')}", time.monotonic())
        self._expires = seen + LEASE_SECONDS
        if self._holder == self._identity:
            return await self._write(lease, holder=self._identity)
        if self._leading:
            self._give_up(f"{self._holder or 'nobody'} holds the Lease")
        if self._holder and time.monotonic() < self._expires:
            return False
        return await self._write(lease, holder=self._identity)

    def _give_up(self, why: str) -> NoReturn:
        logger.error("this process is not the leader any more: %s: exiting at once", why)
        os._exit(LOST)

    async def _account(self) -> list[dict[str, Any]]:
        """Owner of the Lease: the account of this process, if it is one of the Lease's namespace.

        The Lease goes when the account goes: nothing is left behind by whoever removes the operator, and without its
        account no operator can make the Lease again.
        """
        try:
            account = await reviewed(self._client)
        except (ApiError, httpx2.HTTPError) as error:
            logger.warning("who this process is cannot be found out, so its Lease has no owner: %s", error)
            return []
        if account is None or account.namespace != self._namespace or not account.uid:
            return []
        return [{"apiVersion": "v1", "kind": "ServiceAccount", "name": account.name, "uid": account.uid}]

    async def _read(self) -> Any:
        try:
            return await self._client.get(LEASE, self._name, namespace=self._namespace)
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
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
        return await self._accepted(self._client.create(make(LEASE, body)))

    async def _write(self, lease: Any, *, holder: str) -> bool:
        # The resourceVersion that was read goes along: of two candidates only one wins.
        lease["spec"] = {**(lease.get("spec") or {}), **self._spec(holder)}
        lease["metadata"] = {**lease["metadata"], "ownerReferences": self._owners}
        return await self._accepted(self._client.replace(lease))

    def _spec(self, holder: str) -> dict[str, Any]:
        moment = format_time(time.time())[:-1] + "000Z"
        return {"holderIdentity": holder, "leaseDurationSeconds": int(LEASE_SECONDS), "renewTime": moment}

    @staticmethod
    async def _accepted(call: Any) -> bool:
        try:
            await call
        except ApiError as error:
            if error.status.code == HTTPStatus.CONFLICT:
                return False
            raise
        return True
