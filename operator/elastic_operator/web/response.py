"""An answer of the site."""

from __future__ import annotations

import dataclasses
from http import HTTPStatus


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """Status and HTML of an answer."""

    status: HTTPStatus
    body: bytes
