"""Leader election with a Lease, before kopf starts. Whoever loses the Lease ends the process at once.

kopf has no election of its own (its peering needs 60 s to notice a dead peer, and freezes operators of equal priority).
Times are those of client-go's default: a leader renews every 2 s and gives up after 10 s without success; others take
over once a Lease has not changed for 15 s by their own clock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError

from elastic_operator.caches import Renewals
from elastic_operator.resources import LEASE, make
from elastic_operator.wire import format_time

NAME = "elastic-training-operator"
LEASE_SECONDS = 15.0
GIVE_UP_SECONDS = 10.0
RETRY_SECONDS = 2.0
LOST = 70
"""Exit code of a process that is not the leader any more (EX_SOFTWARE)."""

logger = logging.getLogger(__name__)


class Leader:
    """One candidate."""

    def __init__(self, client: AsyncClient, namespace: str, identity: str) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._renewals = Renewals()

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        logger.info("waiting to become the leader (Lease %s/%s)", self._namespace, NAME)
        while not await self._attempt():
            await asyncio.sleep(RETRY_SECONDS)
        logger.info("this process is the leader: %s", self._identity)

    async def hold(self) -> None:
        """Renew for ever; the process ends where that fails for too long: there may be another leader by then."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if await self._attempt():
                renewed = time.monotonic()
            elif time.monotonic() - renewed > GIVE_UP_SECONDS:
                logger.error("lost the leader's Lease: exiting at once")
                os._exit(LOST)

    async def release(self) -> None:
        """Let the next one start without waiting."""
        lease = await self._read()
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            await self._write(lease, holder="")

    async def _attempt(self) -> bool:
        """Take or renew the Lease; False if it is somebody else's or cannot be reached."""
        try:
            lease = await self._read()
            if lease is None:
                return await self._create()
            spec = lease.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            seen = self._renewals.seen(NAME, spec.get("renewTime") or "", time.monotonic())
            if holder not in ("", self._identity) and time.monotonic() - seen < LEASE_SECONDS:
                return False
            return await self._write(lease, holder=self._identity)
        except (ApiError, httpx2.HTTPError) as error:
            logger.warning("leader election: %s", error)
            return False

    async def _read(self) -> Any:
        try:
            return await self._client.get(LEASE, NAME, namespace=self._namespace)
        except ApiError as error:
            if error.status.code == 404:
                return None
            raise

    async def _create(self) -> bool:
        body = make(
            LEASE,
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": NAME, "namespace": self._namespace},
                "spec": self._spec(self._identity),
            },
        )
        return await self._accepted(self._client.create(body))

    async def _write(self, lease: Any, *, holder: str) -> bool:
        # The resourceVersion that was read goes along: of two candidates only one wins.
        lease["spec"] = {**(lease.get("spec") or {}), **self._spec(holder)}
        return await self._accepted(self._client.replace(lease))

    def _spec(self, holder: str) -> dict[str, Any]:
        moment = format_time(time.time())[:-1] + "000Z"
        return {"holderIdentity": holder, "leaseDurationSeconds": int(LEASE_SECONDS), "renewTime": moment}

    @staticmethod
    async def _accepted(call: Any) -> bool:
        try:
            await call
        except ApiError as error:
            if error.status.code == 409:
                return False
            raise
        return True
