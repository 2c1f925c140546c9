"""Logging of the operator: text lines for people, or one JSON object per line for machines."""

from __future__ import annotations

import json
import logging
import sys

from elastic_operator.settings import Settings


def configure_logging(settings: Settings) -> None:
    """Log this package at the configured level and other packages' warnings to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.json_logs else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("elastic_operator").setLevel(settings.log_level)


class TextFormatter(logging.Formatter):
    """Formats a record as one line: time, level, fields, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its fields before the message."""
        fields = getattr(record, "fields", None)
        if not fields:
            return super().format(record)
        head, _, message = super().format(record).partition(record.getMessage())
        return f"{head}{fields['job']} a{fields['attempt']} {fields['reason']}: {record.getMessage()}{message}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its fields as further keys."""
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
