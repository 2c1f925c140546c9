"""What has to be asked beyond what a pass reads: may the pods be, and why are they not there? One for all jobs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError

from elastic_operator.api.spec import SpecError
from elastic_operator.api.status import Status
from elastic_operator.cluster.resources import EVENT, JOB, make
from elastic_operator.cluster.writer import ClusterWriter, NameTakenError, PredecessorError
from elastic_operator.manifests import dry_run
from elastic_operator.manifests.attempt import MANAGER
from elastic_operator.observed import pod_diagnosis
from elastic_operator.observed.observation import Key, Observation, Trouble
from elastic_operator.reconcile.actions import Action, Create, LaunchAttempt
from elastic_operator.reconcile.record import Record


class RefusedError(Exception):
    """The API server does not let an attempt be launched. Known for the next pass, which says so.

    Attributes:
        new: it says something else than the last time.
    """

    def __init__(self, message: str, *, new: bool) -> None:
        super().__init__(message)
        self.new = new


class Diagnostics:
    """Asks, and remembers the answers until they are out of date."""

    def __init__(self, client: AsyncClient, applier: ClusterWriter) -> None:
        self._client = client
        self._applier = applier
        self._troubles: dict[Key, Trouble | None] = {}
        self._asked_at: dict[Key, float] = {}

    async def tried(self, record: Record) -> Record:
        """The record; with the problems in place of its spec, where the API server objects to its pods.

        Raises:
            ApiError: the server cannot answer.
        """
        if isinstance(record.spec, SpecError) or not dry_run.needed(record.job, record.spec, record.status):
            return record
        problems: list[str] = []
        for path, manifest in dry_run.dry_run_jobs(record.job, record.spec):
            problems += await self._objections(path, manifest)
        return dataclasses.replace(record, spec=SpecError(problems)) if problems else record

    async def seen(self, key: Key, status: Status, world: Observation) -> Observation:
        """The world, with what keeps the attempt from getting its pods; asked for now and then while it does not.

        Raises:
            ApiError: the server cannot answer.
        """
        found = self._troubles.get(key)
        if found is not None and found.attempt != status.attempt:
            self._troubles.pop(key)
        asked = pod_diagnosis.question(status, world, time.time())
        if asked is None:
            if found is not None and found.reason not in pod_diagnosis.OF_THE_LAUNCH:
                self._troubles.pop(key, None)
        elif time.monotonic() - self._asked_at.get(key, float("-inf")) >= pod_diagnosis.AGAIN_SECONDS:
            self._asked_at[key] = time.monotonic()
            self._troubles[key] = pod_diagnosis.answer(asked, await self._events(key[0], asked.uid))
        return dataclasses.replace(world, trouble=self._troubles.get(key))

    async def act(self, key: Key, attempt: int, action: Action) -> None:
        """Do one thing.

        Raises:
            ConflictError: the world is not as the decision saw it.
            RefusedError: the API server does not let it be created.
        """
        try:
            await self._applier.act(*key, action)
        except ApiError as error:
            code = error.status.code or 500
            refused = 400 <= code < 500 and code != HTTPStatus.TOO_MANY_REQUESTS
            if not refused or not isinstance(action, Create | LaunchAttempt):
                raise
            raise self._refused(key, pod_diagnosis.refused(attempt, error.status.message)) from error
        except NameTakenError as error:
            raise self._refused(key, pod_diagnosis.name_taken(attempt, str(error))) from error
        except PredecessorError as error:
            raise self._refused(key, pod_diagnosis.predecessor(attempt, str(error))) from error
        known = self._troubles.get(key)
        if isinstance(action, Create | LaunchAttempt) and known is not None:
            del self._troubles[key]

    def _refused(self, key: Key, said: Trouble) -> RefusedError:
        new = self._troubles.get(key) != said
        self._troubles[key] = said
        return RefusedError(said.message, new=new)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._troubles.pop(key, None)
        self._asked_at.pop(key, None)

    async def _objections(self, path: str, manifest: Mapping[str, Any]) -> list[str]:
        """What the API server says to a Job made from the template at `path`; nothing is created."""
        strictly = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": MANAGER}
        try:
            # `create` has no argument for the kind of validation.
            await self._client._client.request("post", obj=make(JOB, manifest), params=strictly)
        except ApiError as error:
            status = error.status
            if dry_run.at_fault(status.code, status.message or ""):
                causes = (status.details.causes if status.details else None) or ()
                fields = [(cause.field or "", cause.message or "") for cause in causes]
                return dry_run.sentences(path, status.message or str(error), fields)
            if (status.code or 500) >= 500:
                raise
        return []

    async def _events(self, namespace: str, uid: str) -> list[Mapping[str, Any]]:
        fields: dict[str, Any] = {"involvedObject.uid": uid}
        return [item async for item in self._client.list(EVENT, namespace=namespace, fields=fields)]
