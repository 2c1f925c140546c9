"""Patterns of a checkpoint mean what they mean to Python's `re`, and take time linear in the names."""

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.pipeline import PipelineInfo, stage_bounds
from reshard.formats.deepspeed.tensor_parallel import regex
from reshard.formats.deepspeed.tensor_parallel.patterns import parse
from reshard.formats.deepspeed.tensor_parallel.regex import Matcher, PatternError, PatternSet

NAMES = [
    "", "a", "aa", "ab", "ba", "abc", "b", "0.qkv", "12.qkv.weight", "model.layers.3.mlp.down_proj.weight", "a\n", "\n",
    "ab\nb", "layers.0.norm", "Layers.0.NORM", "x-y", "x_y", "a b", "é", "É", "٣", "aaaaaaaa", "model.embed", "a.b.c",
    "tied_modules.embed.weight", "experts.w1", "experts.w3", "experts.w4", "\N{SNOWMAN}", "ß", "SS",
]  # fmt: skip
PATTERNS = [
    "", "a", "^a$", "a*", "a+b", "(a|b)*c", "a{2}", "a{2,}", "a{,2}b", "a{0}", "(ab?){1,3}", r"^\d+\.qkv$", r".*\.qkv",
    r"^\d+\.(out|down|qkv)$", r"(?:head\.bias)$", r".*\.(weight|bias)$", r"model\.layers\.\d+\.mlp", r"[a-c]+$",
    r"[^a]",
    r"[\w.]+$", r"\W", r"\S+\s\S+", r"\D", r".", r"(?s).", r"(?i)layers\..*norm", r"(?i:L)ayers", r"\bab\b",
    r"a\B", r"a\Z",
    r"a$", r"(a*)*b", r"((a?)+)+$", r"(|a)+b", r".*\.experts\.w[123]$", r"^x\-y$", r"x[-_]y", r"a??b", r"(?a:\d)",
    r"\d", r"(?x) a  b", r"[^\d]+$", r"(?i)É", r"(?i)[^é]", r"^", r"$", r"\A", r"(?P<name>a)(?:b)", r"\.",
    r"^model\.embed$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_python_matches(pattern):
    found = PatternSet([pattern])
    for name in NAMES:
        assert found.find(name) == ([0] if re.match(pattern, name) else []), name
        assert Matcher(pattern, anywhere=True).match(name) == bool(re.search(pattern, name)), name


_ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\.", "^", "$", r"\b", "ab"])
_TREES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "+?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@given(_TREES, st.text("ab.\n", max_size=6))
def test_any_pattern_matches_what_python_matches(pattern, name):
    assert PatternSet([pattern]).find(name) == ([0] if re.match(pattern, name) else [])


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(a|a)*b", "(a+)+$", "(.*)(.*)(.*)(.*)(.*)x", "(?:a?){60}a{60}b", "(.*a){20}b"]
)
def test_a_catastrophic_pattern_takes_work_in_proportion_to_the_name(pattern, monkeypatch):
    """Check patterns for which the engine of Python needs exponential time."""
    steps = []
    reach = Matcher._reach
    monkeypatch.setattr(Matcher, "_reach", lambda *given: steps.append(1) or reach(*given))
    for length in (1_000, 2_000):
        steps.clear()
        assert not Matcher(pattern).match("a" * length + "!")
        assert len(steps) <= length + 2


def test_many_states_at_once_end_in_an_error_and_not_in_waiting():
    hard = Matcher("(?:a|b)*a" + "(?:a|b)" * 400 + "c")
    chance = Random(5)
    with pytest.raises(PatternError, match="too much work"):
        hard.match("".join(chance.choice("ab") for _ in range(100_000)) + "c!")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "missing"), ("(?=a)", "assert"), ("(?<!a)b", "assert not"), (r"(a)\1", "groupref"), ("(?m)^a", "flag"),
        ("a" * 5000, "5000 characters"), ("(a{1000}){1000}", "more than 4096 states"),
        ("(){4294967294}", "4096 states"), ("(((){4000}){4000}){4000}", "4096 states"),
        ("(" * 1500 + ")" * 1500, "nested too deeply"),
        ("a*+", "possessive"), ("(?>a)", "atomic"),
    ],
)  # fmt: skip
def test_what_is_not_matched_is_refused_and_named(pattern, why):
    with pytest.raises(PatternError, match=why) as caught:
        PatternSet([pattern])
    assert pattern[:60] in str(caught.value).replace("\\\\", "\\")
    with pytest.raises(UnsupportedError, match="universal_checkpoint_info: pattern"):
        parse({"tp_replicated_parameter_patterns": [pattern]}).rule("a", 1)


def test_a_pattern_for_each_parameter_is_looked_up_and_not_tried(monkeypatch):
    """DeepSpeed's AutoTP writes one for each parameter: to try all of them for all would be quadratic."""
    monkeypatch.setattr(regex, "Matcher", None)
    names = [f"model.layers.{at}.self-attn.q_proj.weight" for at in range(5_000)]
    found = PatternSet([rf"^{re.escape(name)}$" for name in names])
    assert [found.find(name) for name in names] == [[at] for at in range(5_000)]
    assert found.find(names[7] + "\n") == [7] and found.find("x" + names[7]) == []


def test_too_many_patterns_of_the_other_kind_are_refused():
    PatternSet([rf".*\.{at}" for at in range(regex.MOST_PATTERNS)])
    with pytest.raises(PatternError, match="at most 512"):
        PatternSet([rf".*\.{at}" for at in range(regex.MOST_PATTERNS + 1)])


@pytest.mark.parametrize("value", [7, "x", {"a": 1}, [7], [None]])
def test_a_description_that_holds_no_patterns_is_refused(value):
    with pytest.raises(UnsupportedError, match="universal_checkpoint_info"):
        parse({"tp_replicated_parameter_patterns": value}).rule("a", 1)


def test_a_catastrophic_partition_method_is_matched_in_linear_time():
    info = PipelineInfo(num_layers=2, partition_method="type:(a|a)*b|Block", layer_types=("a" * 5_000, "MyBLOCK"))
    assert stage_bounds(info, 2, [1, 1]) == (0, 1, 2)
    with pytest.raises(UnsupportedError, match="partition method: pattern"):
        stage_bounds(PipelineInfo(num_layers=1, partition_method="type:(?=a)", layer_types=("a",)), 1, [1])
