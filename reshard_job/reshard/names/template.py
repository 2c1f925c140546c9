"""Names with fields: `model.layers.{layer-1}.mlp.{part:gate_proj|up_proj}.weight`.

A field stands for a part of the name. `{layer}` is a whole number, `{layer+1}` one more than that; `{x:word}` is text
without a dot, `{x:any}` any text, `{x:a|b}` one of the words listed. The same text on both sides of a rule makes it
work both ways.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from reshard.names.arithmetic import evaluate
from reshard.names.split import FindEnd, find_end_of_number, find_end_of_text, find_end_of_word, split

Bindings = Mapping[str, int | str]
"""Value of each field of a template in one name."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_CHOICE = re.compile(r"([A-Za-z_]\w*)\s*:\s*(.+)")
_NUMBER = re.compile(r"^\s*([A-Za-z_]\w*)\s*([+-].*)?$")
_ENDS: Mapping[str, FindEnd] = {"int": find_end_of_number, "word": find_end_of_text("."), "any": find_end_of_text("\n")}
_PATTERNS = {"int": r"0|[1-9]\d{0,17}", "word": r"[^.]+", "any": r".+"}


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A part of a name that differs from tensor to tensor.

    Attributes:
        name: of the field.
        kind: `int`, `word`, `any`, or the words to choose from with `|` between them.
        offset: of a number: what is added to the field's value in this place.
    """

    name: str
    kind: str = "int"
    offset: int = 0

    @property
    def pattern(self) -> str:
        """Regular expression of the field's text."""
        return _PATTERNS.get(self.kind) or "|".join(re.escape(word) for word in self.words)

    @property
    def words(self) -> list[str]:
        """The words to choose from; empty for the other kinds."""
        return [] if self.kind in _PATTERNS else self.kind.split("|")

    @property
    def find_end(self) -> FindEnd:
        """The function that finds the field's end in a name."""
        return find_end_of_word(self.words) if self.words else _ENDS[self.kind]


@dataclasses.dataclass(frozen=True)
class Template:
    """A name with fields.

    Attributes:
        parts: texts and fields, in order.
    """

    parts: tuple[str | Field, ...]

    @property
    def fields(self) -> dict[str, str]:
        """Kind of each field by name."""
        return {part.name: part.kind for part in self.parts if isinstance(part, Field)}

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Regular expression of the names; None where it could try many ways to read a name."""
        if not all(itertools.starmap(_ends_in_one_way, itertools.pairwise((*self.parts, "")))):
            return None
        texts = (f"({part.pattern})" if isinstance(part, Field) else re.escape(part) for part in self.parts)
        return re.compile("".join(texts), re.ASCII)

    @functools.cached_property
    def _splitting(self) -> tuple[str | FindEnd, ...]:
        return tuple(part if isinstance(part, str) else part.find_end for part in self.parts)

    def _split(self, name: str) -> Sequence[str] | None:
        if self._pattern is None:
            return split(name, self._splitting)
        fit = self._pattern.fullmatch(name)
        return None if fit is None else fit.groups()

    def match(self, name: str) -> Bindings | None:
        """Return the value of each field in `name`, or None if the name does not fit."""
        texts = self._split(name)
        if texts is None:
            return None
        bindings: dict[str, int | str] = {}
        fields = (part for part in self.parts if isinstance(part, Field))
        for field, text in zip(fields, texts, strict=True):
            value = int(text) - field.offset if field.kind == "int" else text
            if bindings.setdefault(field.name, value) != value:
                return None
        return bindings

    def render(self, bindings: Bindings) -> str:
        """Return the name for these values.

        Raises:
            ValueError: a number would be negative.
        """
        texts: list[str] = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            value = bindings[part.name]
            if isinstance(value, int):
                value += part.offset
                if value < 0:
                    raise ValueError(
                        f"{self} has {{{part.name}}} = {bindings[part.name]}: {value} is no number of a name"
                    )
            texts.append(str(value))
        return "".join(texts)

    def bind(self, name: str, value: int) -> Template:
        """Return the template with a number in place of one of its fields."""
        return _merged(
            str(value + part.offset) if isinstance(part, Field) and part.name == name else part for part in self.parts
        )

    def __str__(self) -> str:
        return "".join(part if isinstance(part, str) else _text(part) for part in self.parts)


def _ends_in_one_way(part: str | Field, behind: str | Field) -> bool:
    """Return True if a field's start determines its end.

    Then the text after the field cannot belong to it, and none of its words begins with another.
    """
    if isinstance(part, str) or not isinstance(behind, str):
        return isinstance(part, str)
    if part.kind == "int":
        return behind[:1] not in tuple("0123456789")
    if part.kind == "word":
        return behind[:1] in ("", ".")
    words = sorted(part.words)  # of words that begin with one another, neighbours do
    return part.kind != "any" and not any(word.startswith(before) for before, word in itertools.pairwise(words))


def _text(field: Field) -> str:
    if field.kind != "int":
        return f"{{{field.name}:{field.kind}}}"
    return f"{{{field.name}{field.offset:+d}}}" if field.offset else f"{{{field.name}}}"


def parse(text: str, constants: Mapping[str, int]) -> Template:
    """Read a template; fields that are constants, or made of constants only, become text.

    Raises:
        ValueError: what is wrong with it.
    """
    parts: list[str | Field] = []
    position = 0
    for braces in _BRACES.finditer(text):
        parts += [text[position : braces.start()], _field(braces[1], text, constants)]
        position = braces.end()
    parts.append(text[position:])
    template = _merged(parts)
    _check(template.parts, text)
    return template


def _merged(parts: Iterable[str | Field]) -> Template:
    """Return a template in which neighbouring texts are one."""
    merged: list[str | Field] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part:
            merged.append(part)
    return Template(tuple(merged))


def _field(inner: str, text: str, constants: Mapping[str, int]) -> Field | str:
    if choice := _CHOICE.fullmatch(inner.strip()):
        words = choice[2].split("|")
        if len(set(words)) < len(words) or not all(words):
            raise ValueError(f"{text!r}: {{{inner}}} has an empty word, or one twice")
        if len(words) == 1 and choice[2] not in ("word", "any", "int"):
            raise ValueError(f"{text!r}: {{{inner}}}: expected word, any, int, or words with | between them")
        return Field(choice[1], choice[2])
    number = _NUMBER.match(inner)
    if number is not None and number[1] not in constants:
        return Field(number[1], "int", evaluate("0" + (number[2] or ""), constants))
    value = evaluate(inner, constants)
    if value < 0:
        raise ValueError(f"{text!r}: {{{inner}}} is {value}, no number of a name")
    return str(value)


def _check(parts: tuple[str | Field, ...], text: str) -> None:
    if not parts:
        raise ValueError("a name is empty")
    if any("{" in part or "}" in part for part in parts if isinstance(part, str)):
        raise ValueError(f"{text!r}: a brace without its other one")
    if any(isinstance(a, Field) and isinstance(b, Field) for a, b in itertools.pairwise(parts)):
        raise ValueError(f"{text!r}: two fields need text between them to tell where one ends")
    fields = [part for part in parts if isinstance(part, Field)]
    if len({field.name for field in fields}) < len({(field.name, field.kind) for field in fields}):
        raise ValueError(f"{text!r}: a field is of two kinds")
    if sum(field.kind == "any" for field in fields) > 1:
        raise ValueError(f"{text!r}: with two fields of the kind any, a name can be read in two ways")
