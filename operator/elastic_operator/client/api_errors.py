"""Failures of requests to the API server, for the operator and the plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class RequestError(Exception):
    """A request failed: the API server cannot be reached, or does not answer in time."""


class AnswerError(RequestError):
    """The answer is an HTTP error that does not say why, for instance of a proxy, or of a path that does not exist.

    Attributes:
        code: HTTP status.
        path: path of the request.
    """

    def __init__(self, code: int, path: str, message: str = "") -> None:
        super().__init__(message or f"{path}: HTTP status {code}")
        self.code = code
        self.path = path


class ApiError(AnswerError):
    """The API server rejected the request, and says why in a `Status` object.

    Attributes:
        reason: for instance `AlreadyExists`.
        message: the reason for people.
        details: what the request was about, and the causes.
    """

    def __init__(self, code: int, path: str, status: Mapping[str, Any]) -> None:
        self.reason = str(status.get("reason") or "")
        self.message = str(status.get("message") or "")
        self.details: Mapping[str, Any] = status.get("details") or {}
        super().__init__(code, path, self.message)

    @property
    def is_namespace_ending(self) -> bool:
        """True if nothing can be created because the namespace is being deleted."""
        causes = self.details.get("causes") or ()
        return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)


def make_error(code: int, path: str, body: bytes) -> AnswerError:
    """Make the error of an answer that is not a success.

    Args:
        code: HTTP status.
        path: path of the request.
        body: body of the answer.
    """
    try:
        status = json.loads(body)
    except ValueError:
        return AnswerError(code, path)
    if not isinstance(status, dict) or status.get("kind") != "Status":
        return AnswerError(code, path)
    return ApiError(code, path, status)
