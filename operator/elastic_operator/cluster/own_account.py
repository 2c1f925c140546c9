"""Finds the ServiceAccount with which this process calls the API server."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError, RequestError
from elastic_operator.client.resources import SELF_REVIEW
from elastic_operator.manifests.forbidden_accounts import Account, account_of_review

_AGAIN_SECONDS = 2.0

logger = logging.getLogger(__name__)


class UnknownAccountError(Exception):
    """The operator cannot find its own ServiceAccount, so it cannot keep jobs from using that account."""


async def review_account(client: KubernetesClient) -> Account | None:
    """Ask the API server for the ServiceAccount of this process; return None if the process has none.

    Raises:
        ApiError: the API server rejects the SelfSubjectReview.
        RequestError: the API server cannot be reached.
    """
    question = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    return account_of_review(await client.create(SELF_REVIEW, question))


async def find_own_account(client: KubernetesClient, of_pod: Account | None) -> Account | None:
    """Return the ServiceAccount of this process; wait until the API server can be reached.

    Args:
        client: client with the credentials of this process.
        of_pod: the account in the pod's environment, for clusters that do not permit SelfSubjectReviews.

    Raises:
        UnknownAccountError: the API server rejects the review, and the environment names no account.
    """
    while True:
        try:
            return await review_account(client)
        except ApiError as error:
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR and error.code != HTTPStatus.TOO_MANY_REQUESTS:
                if of_pod is not None:
                    return of_pod
                raise UnknownAccountError(
                    f"expected the API server to say whose credentials these are, found: {error}: bind "
                    "ClusterRole system:basic-user, or set POD_NAMESPACE and POD_SERVICE_ACCOUNT"
                ) from error
            reason = str(error)
        except RequestError as error:
            reason = str(error) or repr(error)
        logger.warning("asking the API server whose credentials these are: %s: again in %g s", reason, _AGAIN_SECONDS)
        await asyncio.sleep(_AGAIN_SECONDS)
