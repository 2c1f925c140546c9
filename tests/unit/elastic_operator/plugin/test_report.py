"""`kubectl etj report`: the page tells what the resource holds, and is what it says whatever a tenant wrote."""

from __future__ import annotations

import copy
import html
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from elastic_operator.plugin.errors import Exit
from elastic_operator.plugin.main import main
from elastic_operator.plugin.options import parse
from elastic_operator.plugin.pages.live.losses import Sample
from elastic_operator.plugin.pages.report.html_page import write_html
from elastic_operator.plugin.pages.report.markdown import quote, write_markdown
from elastic_operator.plugin.pages.report.story import MAX_TEXT, Story, draw_topology, make_story

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())
SAMPLES = [
    Sample(attempt=attempt, step=step, samples=step * 20, loss=5 - step / 50)
    for attempt, steps in ((1, range(1, 16)), (2, range(16, 80)), (3, range(70, 100)))
    for step in steps
]
HOSTILE = (
    "</td><script>alert(1)</script><img src=x onerror=alert(1)>'\"`` | x | [a](javascript:b) **b** @all "
    "https://evil.example #1 ``` \x1b]52;c;eA==\x07\u202e\n# forged\n| a | b |\n"
)


def story(stage: str, *, samples: list[Sample] | None = None, **status: Any) -> Story:
    entry = copy.deepcopy(RECORDED[stage])
    entry["job"]["status"] |= status
    return make_story(entry["job"], entry["events"], entry["time"], samples=samples or [], num_unusable=0)


class Reader(HTMLParser):
    """Collects tags, attributes and text of a page; complains about tags that are not closed in order."""

    VOID = ("meta", "line", "rect", "path", "polyline", "circle")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("stage", RECORDED)
def test_every_stage_has_both_pages(stage: str) -> None:
    told = story(stage, samples=SAMPLES)
    page, text = Reader(write_html(told, "1.0")), write_markdown(told, "1.0")
    for found in (page.text, text):
        assert "demo/gpt" in found
        assert "None," not in found.replace("None, ", "")
        for title in ("Training loss", "Attempts", "Recoveries", "Goodput", "Decisions", "Events"):
            assert title in found
    assert page.text.count("Timeline of") == len([item for item in told.job.recoveries if item.total_seconds])


def test_the_page_tells_causes_times_topologies_and_reasons() -> None:
    told = story("drained")
    for found in (Reader(write_html(told, "1.0")).text, write_markdown(told, "1.0")):
        assert "node gpu-3 is Ready=Unknown" in found
        assert "stopped after step 15, went on from the commit of step 15: nothing lost" in found
        assert "15.1 MB read, 15.2 MB written in 0.4 s (materialize, verified)" in found
        assert "status.plan.reason" in found
        assert "38.2%" in found
        assert "stage 2  \N{BLACK SQUARE} \N{BLACK SQUARE}" in found
        assert "The status holds fewer than two training losses" in found


def test_commands_are_code_on_the_page() -> None:
    assert " <code>kubectl etj watch NAME --record FILE</code>" in write_html(story("drained"), "1.0")
    assert "`kubectl" not in write_html(story("drained"), "1.0")
    assert " `kubectl etj watch NAME --record FILE`" in write_markdown(story("drained"), "1.0")


def test_the_losses_of_the_status_are_drawn_and_a_recording_adds_to_them() -> None:
    kept = [
        {"attempt": item.attempt, "step": item.step, "samples": item.samples, "loss": item.loss}
        for item in SAMPLES[::9]
    ]
    told = story("drained", losses=kept)
    assert len(told.samples) == len(kept) + 1
    for found in (Reader(write_html(told, "1.0")).text, write_markdown(told, "1.0")):
        assert "fewer than two" not in found
    assert "Training loss over samples, 14 observations in 4 attempts" in write_html(told, "1.0")
    recorded = story("drained", samples=SAMPLES[40:60], losses=kept)
    assert set(told.samples) | set(SAMPLES[40:60]) == set(recorded.samples)
    assert list(recorded.samples) == sorted(recorded.samples, key=lambda item: (item.attempt, item.step))


def test_the_attempts_trained_between_the_recoveries() -> None:
    assert [(item.attempt, item.first_step, item.last_step) for item in story("drained").spans] == [
        (1, 0, 15), (2, 15, 81), (3, 81, 106), (4, 106, 110)
    ]  # fmt: skip
    spans = story("suspended").spans
    assert [item.attempt for item in spans] == [1, 2, 3, 4]
    assert all(before.end_time <= after.start_time for before, after in itertools.pairwise(spans))


def test_losses_are_drawn_with_one_shaded_range_per_attempt() -> None:
    page = write_html(story("drained", samples=SAMPLES), "1.0")
    assert page.count('<rect class="attempt') == 4, "those of the recording, and the last loss in the status"
    assert page.count('<polyline class="curve"') == 3 + 4, "attempts with several losses, and four spans of steps"
    assert "Training loss over samples, 110 observations in 4 attempts" in page
    assert "kubectl etj watch NAME --record" not in page
    table = write_markdown(story("drained", samples=SAMPLES), "1.0")
    assert "| 2 | 64 | 320 to 1580 | 16 to 79 | 4.68 | 3.42 | 3.42 |" in table


def test_the_html_page_needs_nothing_else_and_runs_nothing() -> None:
    page = Reader(write_html(story("drained", samples=SAMPLES), "1.0"))
    assert not {"script", "link", "img", "iframe", "object", "a", "form", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("href", "src", "style")]
    assert ("http-equiv", "Content-Security-Policy") in page.attributes
    source = write_html(story("drained"), "1.0")
    assert "url(" not in source
    assert "@import" not in source
    assert source.isascii()


def test_tables_and_pictures_can_be_read_aloud() -> None:
    source = write_html(story("drained", samples=SAMPLES), "1.0")
    page = Reader(source)
    assert page.tags.count("caption") == page.tags.count("table") > 5
    assert len(re.findall(r"<th(?! scope)[ >]", source)) == 0
    assert source.count('role="img"><title>') == page.tags.count("svg") > 3
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert ("lang", "en") in page.attributes
    assert "prefers-color-scheme:dark" in source


def poisoned(value: Any) -> Any:
    """Append the hostile text to every text but times, states and what would not be read otherwise."""
    if isinstance(value, dict):
        return {key: item if key in FIXED or key.endswith(("Time", "Until", "since", "until")) else poisoned(item)
                for key, item in value.items()}  # fmt: skip
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


FIXED = {"status", "topology", "target"}


@pytest.mark.parametrize("stage", ["drained", "resharding", "draining"])
def test_no_text_of_a_tenant_is_markup(stage: str) -> None:
    entry = copy.deepcopy(RECORDED[stage])
    entry["job"]["status"] = poisoned(entry["job"]["status"])
    entry["job"]["status"]["phase"] = RECORDED[stage]["job"]["status"]["phase"]
    events = [{**item, "reason": item["reason"] + HOSTILE, "message": HOSTILE} for item in entry["events"]]
    told = make_story(entry["job"], events, entry["time"], samples=SAMPLES)
    assert told.job.message.count("alert(1)") == 2
    source = write_html(told, "1.0")
    page = Reader(source)
    assert not {"script", "img", "a"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", html.unescape(source))
    text = write_markdown(told, "1.0")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert not [line for line in text.splitlines() if line.startswith("# forged")]
    tokens = list(flatten(MarkdownIt("commonmark").enable("table").parse(text)))
    assert not [item.type for item in tokens if item.type.startswith(("html", "link", "image", "em_"))]
    assert sum(item.type == "heading_open" for item in tokens) == 7 + len(told.job.recoveries)
    outside = without_code(text)
    for mark in ("<", "](", "@all", "https://", "alert", "javascript"):
        assert mark not in outside


def flatten(tokens: Iterable[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from flatten(token.children or ())


@given(st.text(alphabet=st.sampled_from("`|\\<>*_[]()!#&;@ -ab1.~\u00e9"), max_size=40))
def test_any_text_is_read_back_from_its_code_span(text: str) -> None:
    parsed = list(flatten(MarkdownIt("commonmark").parse(f"- **x**: {quote(text)}")))
    shown = [item.content for item in parsed if item.type in ("code_inline", "text")]
    assert "".join(shown).removeprefix("x:").strip() == text.strip()
    assert not {item.type for item in parsed} & {"html_inline", "link_open", "image", "em_open", "softbreak"}


def without_code(text: str) -> str:
    """Remove code blocks and spans as CommonMark reads them; cells of a table end at pipes without a backslash."""
    text = re.sub(r"^```text\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = []
    for line in text.splitlines():
        cells = re.split(r"(?<!\\)\|", line) if line.startswith("|") else [line]
        lines += [re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", cell) for cell in cells]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("NodeNotReady", "NodeNotReady"),
        ("a ` b", "``a ` b``"),
        ("`x`", "`` `x` ``"),
        ("- item", "`- item`"),
        ("www.evil.example", "`www.evil.example`"),
        ("<b>", "`<b>`"),
        ("a@b", "`a@b`"),
        ("x" * 3 + "_y_", "`xxx_y_`"),
    ],
)
def test_what_could_be_markdown_is_a_code_span(text: str, shown: str) -> None:
    assert quote(text) == shown


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00+14:00"])
def test_an_event_of_a_time_that_nobody_can_write_has_none(moment: str) -> None:
    entry = copy.deepcopy(RECORDED["drained"])
    event = {**entry["events"][0], "lastTimestamp": None, "eventTime": moment, "message": "odd"}
    made = make_story(entry["job"], [event], entry["time"])
    assert made.job.events[0].time is None
    assert "odd" in write_markdown(made, "1")


def test_a_very_long_text_is_cut_and_says_so() -> None:
    told = story("drained", message="x" * (MAX_TEXT + 500), phase="Failed")
    assert told.job.message == "x" * MAX_TEXT + "... (500 more characters)"
    assert len(write_html(told, "1.0")) < 60_000


@pytest.mark.parametrize(
    ("topology", "lines"),
    [
        ("tp=2,pp=2,dp=2,zero=1", ("stage 0  ## ##", "stage 1  ## ##")),
        ("tp=1,pp=64,dp=128", ("64 stages of 128 replicas with 1 GPUs each",)),
        ("nonsense", ()),
        ("", ()),
    ],
)
def test_a_topology_is_drawn_by_stages_and_replicas(topology: str, lines: tuple[str, ...]) -> None:
    assert tuple(line.replace("\N{BLACK SQUARE}", "#") for line in draw_topology(topology)) == lines


def test_a_job_that_no_operator_has_seen_has_a_page() -> None:
    resource = copy.deepcopy(RECORDED["starting"]["job"])
    del resource["status"]
    told = make_story(resource, [], RECORDED["starting"]["time"])
    assert "nothing has been decided yet" in write_markdown(told, "1.0")
    assert "None has made a step yet." in Reader(write_html(told, "1.0")).text


def test_only_a_report_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["-o", "html", "report", "gpt"]).output == "html"
    with pytest.raises(SystemExit) as caught:
        main(["status", "gpt", "-o", "html"], {})
    assert caught.value.code == Exit.USAGE
    assert "-o html is for report only" in capsys.readouterr().err
