"""As whom this process speaks to the API server."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError

from elastic_operator.cluster.resources import SELF_REVIEW, make
from elastic_operator.manifests.forbidden_accounts import Account, account_of_review

_AGAIN_SECONDS = 2.0

logger = logging.getLogger(__name__)


class UnknownAccountError(Exception):
    """The operator cannot find out whose rights it has, so it cannot keep them out of reach."""


async def reviewed(client: AsyncClient) -> Account | None:
    """Ask the API server which ServiceAccount this process has; None where it has none.

    Raises:
        ApiError: the API server does not answer such questions.
        httpx2.HTTPError: it cannot be reached.
    """
    question = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    return account_of_review(await client.create(make(SELF_REVIEW, question)))


async def own_account(client: AsyncClient, of_pod: Account | None) -> Account | None:
    """Return the ServiceAccount of this process; waits until the API server can be reached.

    Args:
        of_pod: what the pod says of itself, for clusters in which nobody may ask the API server.

    Raises:
        UnknownAccountError: neither says anything.
    """
    while True:
        try:
            return await reviewed(client)
        except ApiError as error:
            code = error.status.code or HTTPStatus.INTERNAL_SERVER_ERROR
            if code < HTTPStatus.INTERNAL_SERVER_ERROR and code != HTTPStatus.TOO_MANY_REQUESTS:
                if of_pod is not None:
                    return of_pod
                raise UnknownAccountError(
                    f"expected the API server to say whose credentials these are, found: {error}: bind "
                    "ClusterRole system:basic-user, or set POD_NAMESPACE and POD_SERVICE_ACCOUNT"
                ) from error
            reason = str(error)
        except httpx2.HTTPError as error:
            reason = str(error) or repr(error)
        logger.warning("asking the API server whose credentials these are: %s: again in %g s", reason, _AGAIN_SECONDS)
        await asyncio.sleep(_AGAIN_SECONDS)
