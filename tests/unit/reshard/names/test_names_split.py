"""Names are read by templates in time linear in the name, as Python's regular expressions would read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.names import split as splitting
from reshard.names.template import Field, Template, parse

_FIELDS = ["{%s}", "{%s:word}", "{%s:a|ab|1}", "{%s:ba|b}"]
_TEXTS = st.sampled_from(["", "a", ".", "1", "b.", "0", "ab"])


@st.composite
def _templates(draw):
    parts = [draw(_TEXTS)]
    for at in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(_FIELDS if at else [*_FIELDS, "{%s:any}"]))
        parts += [kind % f"f{at}", draw(_TEXTS.filter(bool))]
    return parse("".join(parts), {})


@given(_templates(), st.text("ab.01", max_size=10))
def test_a_template_reads_a_name_as_a_regular_expression_does(template: Template, name: str) -> None:
    texts = (f"({part.pattern})" if isinstance(part, Field) else re.escape(part) for part in template.parts)
    expected = re.fullmatch("".join(texts), name, re.ASCII)
    found = splitting.split(name, template._splitting)
    assert found == (None if expected is None else list(expected.groups()))
    assert template._split(name) is None if expected is None else list(template._split(name)) == found


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{{f{at}:word}}x" for at in range(20)) + "!", "".join(f"{{f{at}}}1" for at in range(20)) + "!",
        "".join(f"{{f{at}:x|xx}}x" for at in range(20)) + "!", "{a:any}x{b:word}x{c:word}x!",
    ],
)  # fmt: skip
def test_many_ways_to_read_a_name_are_not_tried_one_by_one(text, monkeypatch):
    template = parse(text, {})
    assert template._pattern is None
    asked = []
    monkeypatch.setitem(template.__dict__, "_splitting", tuple(
        part if isinstance(part, str) else lambda *given, part=part: asked.append(1) or part(*given)
        for part in template._splitting
    ))  # fmt: skip
    name = ("1" if "{f0}" in text else "x") * 400
    assert template.match(name) is None
    assert len(asked) <= 400 * 21


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("model.layers.{layer-1}.mlp.{part:gate_proj|up_proj}.weight", True), ("{a:word}.b", True),
        ("{a:word}b", False), ("x{n}", True), ("x{n}0", False), ("{a:b|bc}.", False), ("{a:any}", False),
        ("{a:word}", True),
    ],
)  # fmt: skip
def test_usual_templates_are_read_by_a_regular_expression(text, plain):
    assert (parse(text, {})._pattern is not None) is plain


def test_a_field_of_many_spaces_is_read_at_once():
    assert str(parse("{a:" + " " * 200_000 + "word" + " " * 200_000 + "}", {})) == "{a:word}"
