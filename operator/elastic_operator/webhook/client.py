"""One request to the webhook: certificates verified, no redirects, a bounded answer, and never a word of the URL.

The path of a webhook's URL is usually its password. So neither the URL, nor messages of exceptions, nor the body of an
answer appear in logs: all of these may repeat it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import math
import time
from collections.abc import Mapping

import aiohttp

REQUEST_SECONDS = 10.0
"""Maximum time of one request, with its answer."""

MAX_ANSWER_BYTES = 16_384
"""Maximum length of an answer whose connection is used again."""

MAX_RETRY_AFTER_SECONDS = 300.0
"""Longest wait that a receiver can ask for."""

_RETRIED = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may succeed later."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one request.

    Attributes:
        status: HTTP status; None if there was no answer.
        error: kind of error without an answer.
        retry_after: seconds that the receiver asked to wait for; None if it did not.
    """

    status: int | None = None
    error: str = ""
    retry_after: float | None = None

    @property
    def is_success(self) -> bool:
        """True if the receiver has accepted the notification."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_final(self) -> bool:
        """True if another try would get the same answer."""
        return self.status is not None and self.status < 500 and self.status not in _RETRIED

    def __str__(self) -> str:
        return f"HTTP status {self.status}" if self.status is not None else self.error


class WebhookClient:
    """A client of one URL. It has to be created in the event loop that uses it, and to be closed there.

    Args:
        url: where to post; secret.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            # `ssl=True`: certificates and names are verified. The environment's proxies are not used.
            connector=aiohttp.TCPConnector(limit=2, ssl=True),
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers={"User-Agent": "elastic-training-operator", "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post a body; return what came of it. Raises nothing for a receiver that is away, slow or hostile."""
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                answer = Answer(
                    status=response.status, retry_after=parse_retry_after(response.headers.get("Retry-After"))
                )
                # The status decides; the body is only read to free the connection for the next request.
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    await _skip_body(response)
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return Answer(error=type(error).__name__)


async def _skip_body(response: aiohttp.ClientResponse) -> None:
    """Read a short body to its end; close the connection under a long or slow one."""
    try:
        async with asyncio.timeout(1.0):
            num_bytes = 0
            while chunk := await response.content.read(MAX_ANSWER_BYTES):
                num_bytes += len(chunk)
                if num_bytes > MAX_ANSWER_BYTES:
                    break
            else:
                return
    except TimeoutError:
        pass
    response.close()


def parse_retry_after(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header, at most MAX_RETRY_AFTER_SECONDS; None if it is absent or invalid."""
    if text is None or len(text) > 64:
        return None
    try:
        seconds = float(text) if text.strip().isdecimal() else _seconds_until(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS) if math.isfinite(seconds) else None


def _seconds_until(text: str) -> float:
    return email.utils.parsedate_to_datetime(text).timestamp() - time.time()
