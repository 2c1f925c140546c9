"""Files of patterns: every kind, and what is wrong said all at once."""

from pathlib import Path

import pytest

from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.tensor_parallel.pattern_file import build, load
from reshard.formats.deepspeed.tensor_parallel.patterns import parse

TEXT = r"""
version: 1
vocabulary: {rows: 13, padded_rows: 16, multiple: 4}
rules:
  - {pattern: '.*norm', kind: replicate}
  - {pattern: 'head\.bias', kind: unique}
  - {pattern: '.*\.(out|down)', kind: shard-h}
  - {pattern: '.*\.up', kind: shard-v}
  - {pattern: '.*\.qkv', kind: shard-nc, dim: 0, parts: [8, 4, 4]}
  - {pattern: '.*\.gate_up', kind: shard-nc, dim: 0, parts: 2}
  - {pattern: '.*\.experts', kind: shard-nc, dim: 1, view: [4, 6, 8]}
  - {pattern: '.*\.fused_experts', kind: shard-nc, dim: 1, view: [4, 6, 8], parts: 3}
  - {pattern: '.*\.conv', kind: shard-hy, dim: 2}
  - {pattern: 'embed', kind: shard-v, vocabulary: true}
"""


@pytest.fixture
def patterns(tmp_path):
    path = tmp_path / "patterns.yaml"
    path.write_text(TEXT)
    return parse(load(path))


@pytest.mark.parametrize(
    ("name", "shard", "whole", "rank1"),
    [
        ("0.norm", (8,), (8,), [((0,), (0,), (8,))]),
        ("head.bias", (8,), (8,), [((0,), (0,), (8,))]),
        ("0.down", (8, 3), (8, 6), [((0, 0), (0, 3), (8, 3))]),
        ("0.up", (4, 8), (8, 8), [((0, 0), (4, 0), (4, 8))]),
        ("0.up", (4,), (8,), [((0,), (4,), (4,))]),
        ("0.qkv", (8, 8), (16, 8), [((0, 0), (4, 0), (4, 8)), ((4, 0), (10, 0), (2, 8)), ((6, 0), (14, 0), (2, 8))]),
        ("0.qkv", (8,), (16,), [((0,), (4,), (4,)), ((4,), (10,), (2,)), ((6,), (14,), (2,))]),
        ("0.gate_up", (6, 8), (12, 8), [((0, 0), (3, 0), (3, 8)), ((3, 0), (9, 0), (3, 8))]),
        ("0.experts", (12, 8), (24, 8), [((3 * at, 0), (6 * at + 3, 0), (3, 8)) for at in range(4)]),
        ("0.conv", (2, 3, 2), (2, 3, 4), [((0, 0, 0), (0, 0, 2), (2, 3, 2))]),
        ("embed", (8, 8), (16, 8), [((0, 0), (8, 0), (8, 8))]),
    ],
)
def test_rules_say_what_the_second_of_two_ranks_holds(patterns, name, shard, whole, rank1):
    rule, found = patterns.resolve(name, [shard, shard])
    assert found == whole
    assert [tuple(piece) for piece in rule.box_pairs(whole, 2, 1)] == rank1
    assert rule.vocabulary == (name == "embed")


def test_vocabulary_and_completeness(patterns):
    assert patterns.vocabulary_rows == (13, 16)
    assert patterns.padded_rows(8) == 32
    assert patterns.tells_rows
    with pytest.raises(UnsupportedError, match="no pattern matches it"):
        patterns.rule("0.upper", 2)  # patterns match whole names
    info = build({"version": 1, "rules": [{"pattern": kind, "kind": kind} for kind in ("replicate", "shard-h")]})
    info["parameter_with_row_parallelism_patterns"].append("replicate")
    with pytest.raises(UnsupportedError, match="all claim it"):
        parse(info).rule("replicate", 2)


def test_parts_of_a_view_that_it_does_not_divide_by_tp(patterns):
    with pytest.raises(UnsupportedError, match="does not say what is cut"):
        patterns.resolve("0.fused_experts", [(12, 8)] * 4)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"pattern": "x", "kind": "average", "dim": 0}, "takes no dim"),
        ({"pattern": "x", "kind": "other"}, "expected one of unique"),
        ({"pattern": "x"}, "kind None"),
        ({"kind": "unique"}, "expected a mapping with pattern"),
        ({"pattern": "(", "kind": "unique"}, "pattern '\\('"),
        ({"pattern": "x", "kind": "shard-h", "dim": 0}, "takes no dim"),
        ({"pattern": "x", "kind": "shard-v", "parts": [1]}, "takes no parts"),
        ({"pattern": "x", "kind": "unique", "colour": 1}, "unknown key colour"),
        ({"pattern": "x", "kind": "shard-nc", "dim": 0}, "expected parts, or a view"),
        ({"pattern": "x", "kind": "shard-nc", "parts": [1]}, "dim is None"),
        ({"pattern": "x", "kind": "shard-nc", "dim": 3, "view": [2, 2]}, "dim 3 of the view"),
        ({"pattern": "x", "kind": "shard-nc", "dim": 1, "view": [2, 2], "parts": [1]}, "do not add up to 2"),
        ({"pattern": "x", "kind": "shard-nc", "dim": 1, "view": [2, 3], "parts": 2}, "do not add up to 3"),
        ({"pattern": "x", "kind": "shard-nc", "dim": 1, "view": [2, -1]}, "expected a list of sizes"),
    ],
)
def test_rule_that_says_too_much_or_too_little_is_refused(rule, text):
    with pytest.raises(UsageError) as caught:
        build({"version": 1, "rules": [{"pattern": "y", "kind": "unique"}, rule]})
    assert any(text.replace("\\", "") in problem for problem in caught.value.problems), caught.value.problems
    assert all(problem.startswith("rule 2: ") for problem in caught.value.problems)


@pytest.mark.parametrize(
    "value",
    [None, [], {"rules": []}, {"version": 2, "rules": []}, {"version": 1}, {"version": 1, "rules": [], "more": 1},
     {"version": 1, "rules": [], "vocabulary": {"rows": 3}}, {"version": 1, "rules": [], "vocabulary": [1]},
     {"version": 1, "rules": [], "vocabulary": {"rows": 0, "padded_rows": 4}}],
)  # fmt: skip
def test_other_documents_are_refused(value):
    with pytest.raises(UsageError):
        build(value)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "patterns.yaml"
    with pytest.raises(UsageError, match=r"patterns.yaml: cannot be read"):
        load(path)
    path.write_text("version: [")
    with pytest.raises(UsageError, match=r"patterns.yaml: is no YAML: .* in line 1, column 11"):
        load(path)
    path.write_text("version: 1\nrules: [{pattern: x, kind: mean}]")
    with pytest.raises(UsageError, match=r"patterns.yaml: is no file of patterns"):
        load(path)


def test_example_of_the_documentation_is_a_file_of_patterns(tmp_path):
    page = (Path(__file__).parents[5] / "docs" / "deepspeed-format.md").read_text()
    path = tmp_path / "patterns.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    found = parse(load(path))
    assert found.padded_rows(4) == 50688
    rule, whole = found.resolve("0.experts.w1", [(8 * 7168, 4096)] * 2)
    assert (whole, rule.repeat) == ((8 * 14336, 4096), 8)


def test_an_average_is_a_mean_of_whole_copies():
    rules = [{"pattern": r".*\.scale", "kind": "average"}]
    rule = parse(build({"version": 1, "rules": rules})).rule("0.scale", 1)
    assert (rule.dim, rule.averaged) == (None, True)
