"""Bodies of the requests to a webhook: Slack's JSON and CloudEvents 1.0 in structured JSON. Pure."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

from elastic_operator.api.serialization import format_time
from elastic_operator.reconcile.notifications.notification import Notification, NotificationKind
from reshard.contract import GROUP

_TYPE_PREFIX = f"{'.'.join(reversed(GROUP.split('.')))}.job."

_NOT_PLAIN = re.compile(r"[&<>]")
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_ACTIVE = re.compile(r"(?<=@)|(?<=\])(?=\()")
_BREAK = "\u200b"
"""A space without width: for Mattermost, `@all` is a mention and `[text](address)` a link, without any escape."""


class Format(enum.StrEnum):
    """Formats of a notification; the values are those of `--notification-format`."""

    SLACK = "slack"
    """`{"text": ...}`, which Slack, Mattermost and others accept."""
    CLOUDEVENTS = "cloudevents"
    """CloudEvents 1.0, structured mode in JSON."""


CONTENT_TYPES = {
    Format.SLACK: "application/json; charset=utf-8",
    Format.CLOUDEVENTS: "application/cloudevents+json; charset=utf-8",
}

EVENT_TYPES = {kind: f"{_TYPE_PREFIX}{kind.lower()}" for kind in NotificationKind}
"""`type` of a CloudEvent by kind, such as `dev.elastictraining.job.recovered`."""


def format_body(notification: Notification, format_: Format, *, source: str, num_left_out: int = 0) -> bytes:
    """Return the body of a request.

    Args:
        notification: the fact to tell.
        format_: its format.
        source: what identifies this operator: `source` of a CloudEvent, and the end of the text for Slack.
        num_left_out: notifications of the same job that were dropped before it.
    """
    body = _to_slack if format_ is Format.SLACK else _to_cloudevent
    return json.dumps(body(notification, source, num_left_out), ensure_ascii=False).encode()


def _to_slack(notification: Notification, source: str, num_left_out: int) -> dict[str, Any]:
    # Escaped, a text from a pod cannot mention a channel, or hide the address of a link.
    note = f" ({num_left_out} earlier notifications of this job were left out)" if num_left_out else ""
    text = _escape(f"{notification.text}{note}")
    job = _escape(f"{notification.namespace}/{notification.name}")
    return {"text": f"*{job}* {notification.kind}: {text} [{_escape(source)}]"}


def _to_cloudevent(notification: Notification, source: str, num_left_out: int) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": notification.id,
        "source": source,
        "type": EVENT_TYPES[notification.kind],
        "subject": f"{notification.namespace}/{notification.name}",
        "time": format_time(notification.time),
        "datacontenttype": "application/json",
        "data": {**notification.data, "numLeftOut": num_left_out},
    }


def _escape(text: str) -> str:
    return _ACTIVE.sub(_BREAK, _NOT_PLAIN.sub(lambda found: _ESCAPES[found[0]], text))
