"""docs/notifications.md says what the code does: kinds, types, results, constants, the examples, the chart's values."""

from __future__ import annotations

import importlib
import json
import re

import yaml

from elastic_operator.cluster.leader_election import NOTIFIED_UNTIL
from elastic_operator.main import LAST_NOTIFICATIONS_SECONDS
from elastic_operator.metrics.definitions import NotificationResult
from elastic_operator.reconcile.notifications.formats import EVENT_TYPES, Format, format_body
from elastic_operator.reconcile.notifications.notification import NotificationKind, find_notifications
from elastic_operator.settings import URL_VARIABLE
from elastic_operator.webhook.client import MAX_ANSWER_BYTES
from tests.pages import ROOT, rows, section
from tests.unit.elastic_operator.reconcile.notifications.test_notifications import JOB, RUNNING, Status

TEXT = (ROOT / "docs/notifications.md").read_text(encoding="utf-8")
CHART = ROOT / "charts/elastic-training-operator"


def test_the_kinds_and_types_are_those_of_the_code() -> None:
    told = [(kind, type_.strip("`")) for kind, _, type_ in rows(section(TEXT, "What is told"))]
    assert told == [(str(kind), type_) for kind, type_ in EVENT_TYPES.items()]


def test_results_and_constants_are_those_of_the_code() -> None:
    told = rows(section(TEXT, "How often a message arrives"))
    results = [row[0] for row in told if len(row) == 2]
    assert [*results, "sent"] == [item for item in NotificationResult if item != "sent"] + ["sent"]
    constants = [row for row in told if len(row) == 3]
    assert len(constants) > 10
    for name, value, _ in constants:
        module, _, constant = name.strip("`").rpartition(".")
        assert getattr(importlib.import_module(f"elastic_operator.webhook.{module}"), constant) == float(value), name
    assert f"up to {LAST_NOTIFICATIONS_SECONDS:g} s" in TEXT
    assert f"{MAX_ANSWER_BYTES // 1024} KiB of an answer" in " ".join(TEXT.split())
    assert NOTIFIED_UNTIL in TEXT and URL_VARIABLE in TEXT


def test_the_examples_are_what_is_sent() -> None:
    slack, event = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL))
    (item,) = find_notifications(JOB, Status(), RUNNING)
    assert json.loads(format_body(item, Format.SLACK, source="cluster-a")) == slack
    sent = json.loads(format_body(item, Format.CLOUDEVENTS, source="cluster-a"))
    for part in (event, event["data"]["job"]):
        part |= {key: None for key in ("id", "uid", "time") if key in part}
    for part in (sent, sent["data"]["job"]):
        part |= {key: None for key in ("id", "uid", "time") if key in part}
    assert sent == event


def test_the_chart_knows_the_same_kinds_and_formats() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["notifications"]["properties"]
    assert schema["kinds"]["items"]["enum"] == list(NotificationKind)
    assert schema["format"]["enum"] == list(Format)
    values = yaml.safe_load((CHART / "values.yaml").read_text())["notifications"]
    told = rows(section(TEXT, "Turn them on"))
    named = {name for row in told for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(values)
    options = (ROOT / "docs/cli-reference.md").read_text(encoding="utf-8")
    for row in told[1:]:
        assert row[1].strip("`") in options
