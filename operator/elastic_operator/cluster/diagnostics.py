"""Dry runs of pod templates, and diagnoses of missing pods, for all jobs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from elastic_operator.api.spec import SpecError
from elastic_operator.api.status import Status
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError
from elastic_operator.client.resources import EVENT, JOB
from elastic_operator.cluster.writer import ClusterWriter, ConflictError, NameTakenError, PredecessorError
from elastic_operator.manifests import dry_run
from elastic_operator.manifests.attempt import MANAGER
from elastic_operator.observed import pod_diagnosis
from elastic_operator.observed.observation import Key, Observation, PodDiagnosis
from elastic_operator.reconcile.actions import Action, Create, DeletePod, LaunchAttempt, split_actions
from elastic_operator.reconcile.record import Record

CONCURRENT_DELETIONS = 32
"""Pods that are deleted at the same time; the client has more connections, which other jobs use."""

logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """The API server rejected an object of a launch. The next pass reports the reason in the status.

    Attributes:
        is_new: the reason differs from that of the previous rejection.
    """

    def __init__(self, message: str, *, is_new: bool) -> None:
        super().__init__(message)
        self.is_new = is_new


class Diagnostics:
    """Sends diagnostic requests, and caches their results until they are out of date."""

    def __init__(self, client: KubernetesClient, writer: ClusterWriter) -> None:
        self._client = client
        self._writer = writer
        self._troubles: dict[Key, PodDiagnosis | None] = {}
        self._question_times: dict[Key, float] = {}

    async def dry_run_pods(self, record: Record) -> Record:
        """Dry-run the pod templates of a job; if the API server rejects one, replace the record's spec by the problems.

        Raises:
            ApiError: the API server cannot answer.
        """
        if isinstance(record.spec, SpecError) or not dry_run.is_dry_run_needed(record.job, record.spec, record.status):
            return record
        problems: list[str] = []
        for path, manifest in dry_run.build_dry_run_jobs(record.job, record.spec):
            problems += await self._find_objections(path, manifest)
        return dataclasses.replace(record, spec=SpecError(problems)) if problems else record

    async def diagnose(self, key: Key, status: Status, world: Observation) -> Observation:
        """Add to `world` the reason why pods of the current attempt are missing, if they are.

        While pods are missing, the reason is read again every `pod_diagnosis.AGAIN_SECONDS`.

        Raises:
            ApiError: the API server cannot answer.
        """
        known_trouble = self._troubles.get(key)
        if known_trouble is not None and known_trouble.attempt != status.attempt:
            self._troubles.pop(key)
        question = pod_diagnosis.choose_event_query(status, world, time.time())
        if question is None:
            if known_trouble is not None and known_trouble.reason not in pod_diagnosis.LAUNCH_REASONS:
                self._troubles.pop(key, None)
        elif time.monotonic() - self._question_times.get(key, float("-inf")) >= pod_diagnosis.AGAIN_SECONDS:
            self._question_times[key] = time.monotonic()
            self._troubles[key] = pod_diagnosis.diagnose_from_events(question, await self._events(key[0], question.uid))
        return dataclasses.replace(world, pod_diagnosis=self._troubles.get(key))

    async def act_all(self, key: Key, attempt: int, actions: Sequence[Action]) -> None:
        """Execute actions in the order of `split_actions`, and delete many pods at a time.

        An object that cannot be created delays no deletion: quota for it may only be free once the pods are gone.
        After any other error, nothing further is done.

        Raises:
            ConflictError: the cluster has changed since the decision.
            RefusedError: the API server rejected an object to create.
        """
        others, deletions, launches = split_actions(actions)
        errors: list[BaseException] = []
        for action in others:
            try:
                await self.act(key, attempt, action)
            except (ConflictError, RefusedError) as error:
                if not isinstance(action, Create):
                    raise
                errors.append(error)
        errors += await self._delete_pods(key, attempt, deletions)
        if errors:
            raise errors[0]
        for launch in launches:
            await self.act(key, attempt, launch)

    async def _delete_pods(self, key: Key, attempt: int, actions: Sequence[DeletePod]) -> list[BaseException]:
        """Delete pods, and return the errors."""
        slots = asyncio.Semaphore(CONCURRENT_DELETIONS)

        async def delete(action: DeletePod) -> None:
            async with slots:
                await self.act(key, attempt, action)

        results = await asyncio.gather(*map(delete, actions), return_exceptions=True)
        return [result for result in results if isinstance(result, BaseException)]

    async def act(self, key: Key, attempt: int, action: Action) -> None:
        """Execute one action, and remember why the API server rejected it.

        Raises:
            ConflictError: the cluster has changed since the decision.
            RefusedError: the API server rejected an object to create.
        """
        logger.debug("%s/%s: %s", *key, type(action).__name__)
        try:
            await self._writer.act(*key, action)
        except ApiError as error:
            is_refused = 400 <= error.code < 500 and error.code != HTTPStatus.TOO_MANY_REQUESTS
            if not is_refused or error.is_namespace_ending or not isinstance(action, Create | LaunchAttempt):
                raise
            raise self._refused(key, pod_diagnosis.diagnose_refused_launch(attempt, error.message)) from error
        except NameTakenError as error:
            raise self._refused(key, pod_diagnosis.diagnose_name_conflict(attempt, str(error))) from error
        except PredecessorError as error:
            raise self._refused(key, pod_diagnosis.diagnose_running_predecessor(attempt, str(error))) from error
        known = self._troubles.get(key)
        if isinstance(action, Create | LaunchAttempt) and known is not None:
            del self._troubles[key]

    def _refused(self, key: Key, trouble: PodDiagnosis) -> RefusedError:
        is_new = self._troubles.get(key) != trouble
        self._troubles[key] = trouble
        return RefusedError(trouble.message, is_new=is_new)

    def forget(self, key: Key) -> None:
        """Remove what is cached of a deleted job."""
        self._troubles.pop(key, None)
        self._question_times.pop(key, None)

    async def _find_objections(self, path: str, manifest: Mapping[str, Any]) -> list[str]:
        """Dry-run the creation of a Job made from the template at `path`, and return the API server's objections."""
        try:
            await self._client.create(JOB, manifest, dryRun="All", fieldValidation="Strict", fieldManager=MANAGER)
        except ApiError as error:
            if dry_run.is_spec_at_fault(error.code, error.message):
                causes = error.details.get("causes") or ()
                fields = [(cause.get("field") or "", cause.get("message") or "") for cause in causes]
                return dry_run.describe_refusal(path, error.message or str(error), fields)
            if error.code >= 500:
                raise
        return []

    async def _events(self, namespace: str, uid: str) -> list[Mapping[str, Any]]:
        return [
            item
            async for item in self._client.list_objects(EVENT, namespace=namespace, fields=f"involvedObject.uid={uid}")
        ]
