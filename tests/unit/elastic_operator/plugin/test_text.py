"""How `kubectl etj` writes ages, sizes and tables."""

from __future__ import annotations

import pytest

from elastic_operator.plugin.pages.text import (
    WIDTH,
    format_age,
    format_fields,
    format_seconds,
    format_size,
    format_table,
    pluralize,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (-3, "0s"), (0, "0s"), (119.9, "119s"), (120, "2m"), (130, "2m10s"), (599, "9m59s"), (600, "10m"),
        (3 * 3600 - 1, "179m"), (3 * 3600, "3h"), (3 * 3600 + 300, "3h5m"), (8 * 3600, "8h"), (47 * 3600, "47h"),
        (49 * 3600, "2d1h"), (8 * 86400, "8d"), (800 * 86400, "2y"),
    ],
)  # fmt: skip
def test_ages_are_those_of_kubectl(value: float | None, text: str) -> None:
    assert format_age(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (15_195_243, "15.2 MB"), (999_600, "1 MB"), (7e12, "7 TB")],
)  # fmt: skip
def test_sizes_have_three_digits_and_decimal_units(value: float, text: str) -> None:
    assert format_size(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.04, "0.0 s"), (25.83, "25.8 s"), (601, "10m")])
def test_durations_have_tenths_while_they_matter(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("number", "what", "text"), [(1, "step", "1 step"), (0, "step", "0 steps"), (2, "loss", "2 losses")]
)
def test_counts_agree_with_their_noun(number: int, what: str, text: str) -> None:
    assert pluralize(number, what) == text


def test_tables_are_aligned_and_have_no_trailing_blanks() -> None:
    assert format_table(("A", "LONG"), [("value", ""), ("b", "c")]).splitlines() == [
        "A       LONG",
        "value   -",
        "b       c",
    ]


def test_fields_leave_empty_ones_out_and_wrap_long_ones_under_their_value() -> None:
    lines = format_fields([("Name", "gpt"), ("Empty", ""), ("Message", "word " * 60)]).splitlines()
    assert lines[0] == "Name:     gpt"
    assert all(line.startswith(" " * 10) for line in lines[2:])
    assert max(len(line) for line in lines) <= WIDTH
    assert "Empty" not in "\n".join(lines)
