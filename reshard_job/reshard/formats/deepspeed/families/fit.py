"""Compare a model's names and shapes with those of one family. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from reshard.formats.deepspeed.families.shapes import MisfitError, Sizes
from reshard.formats.deepspeed.families.tables import Entry, Family

_NUMBER = re.compile(r"\\\{([a-z]+)\\\}")
_LAYER = "layer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A family that a model is of.

    Attributes:
        family: the family.
        entries: name of each parameter -> its entry.
        sizes: values of the named sizes.
        tied: the output head is the same tensor as the embedding.
    """

    family: Family
    entries: Mapping[str, Entry]
    sizes: Mapping[str, int]
    tied: bool

    def kind_of(self, name: str) -> str:
        """Return how a parameter is split."""
        entry = self.entries[name]
        return entry.tied_kind if self.tied and entry.tied_kind else entry.kind


def rate(family: Family, names: Iterable[str]) -> tuple[int, int]:
    """Return how many names are those of a family's parameters, and minus how many of its entries no name has."""
    patterns = [_compile(entry) for entry in family.entries]
    matches = [[at for at, pattern in enumerate(patterns) if pattern.fullmatch(name)] for name in names]
    return sum(map(bool, matches)), len({at for found in matches for at in found}) - len(patterns)


def fit_family(family: Family, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]) -> Fit:
    """Compare every parameter with a family.

    Args:
        family: the family.
        shapes: of all parameters, by name.
        aliases: second name of a tied parameter -> its first.

    Raises:
        MisfitError: the model is of another family; the message names the first parameter that differs.
    """
    entries, numbers = _match_names(family, shapes)
    layers = sorted(numbers.pop(_LAYER, set()))
    _check_numbers(family, layers, numbers)
    known = {_fill(entry, layer, numbers) for entry in family.entries for layer in layers}
    present = {entry.group for entry in entries.values()}
    head, embedding = family.head
    tied = bool(head) and head not in shapes and aliases.get(head) == embedding
    if family.one_of and len(present & {*family.one_of}) != 1:
        raise MisfitError(
            f"it has {' and '.join(sorted(present & {*family.one_of})) or 'none'} of {', '.join(family.one_of)}"
        )
    required = [entry for entry in family.entries if not entry.group or entry.group in present]
    required += [entry for entry in family.entries if entry.name == head and not tied]
    for entry in required:
        for name in (_fill(entry, layer, numbers) for layer in layers):
            if name not in shapes:
                raise MisfitError(f"{name} is missing")
    assert entries.keys() <= known
    sizes = Sizes()
    for entry in family.entries:
        for name in (name for name, own in entries.items() if own is entry):
            sizes.fit(name, shapes[name], entry.shape)
    _check_heads(sizes.values)
    return Fit(family=family, entries=entries, sizes=sizes.values, tied=tied)


def _check_heads(sizes: Mapping[str, int]) -> None:
    """Check that queries, keys and values are made of whole heads, as far as shapes tell.

    Raises:
        MisfitError: they are not.
    """
    query, key, head = (sizes.get(name, 0) for name in ("query", "key", "head"))
    if key and query % key:
        raise MisfitError(f"queries have {query} rows and keys {key}, expected a multiple")
    if head and (query % head or key % head):
        raise MisfitError(f"queries have {query} rows and keys {key}, expected multiples of a head's {head}")


def _match_names(family: Family, names: Mapping[str, object]) -> tuple[dict[str, Entry], dict[str, set[int]]]:
    """Return the entry of each name, and the numbers that stand in names, by the word in braces."""
    patterns = [(entry, _compile(entry)) for entry in family.entries]
    entries: dict[str, Entry] = {}
    numbers: dict[str, set[int]] = {}
    for name in names:
        matches = [(entry, match) for entry, pattern in patterns if (match := pattern.fullmatch(name))]
        if len(matches) != 1:
            raise MisfitError(f"{name} is {'none' if not matches else 'more than one'} of its parameters")
        entries[name], match = matches[0]
        for word, number in match.groupdict().items():
            numbers.setdefault(word, set()).add(int(number))
    return entries, numbers


def _check_numbers(family: Family, layers: list[int], numbers: Mapping[str, set[int]]) -> None:
    """Check that layers follow each other, and that other numbers occur once.

    Raises:
        MisfitError: they do not.
    """
    first = family.first_layer
    if not layers or layers[-1] - layers[0] + 1 != len(layers) or first not in (None, layers[0]):
        where = "" if first is None else f" from {first} on"
        raise MisfitError(f"its layers have the numbers {layers[:8]}, expected all{where}")
    for word, found in numbers.items():
        if len(found) != 1:
            raise MisfitError(f"the numbers {sorted(found)[:8]} stand for {word}, expected one")


def _compile(entry: Entry) -> re.Pattern[str]:
    return re.compile(_NUMBER.sub(r"(?P<\1>0|[1-9][0-9]{0,8})", re.escape(entry.name)))


def _fill(entry: Entry, layer: int, numbers: Mapping[str, set[int]]) -> str:
    """Return the name of an entry's parameter in a layer; a number that no name has stays a word in braces."""
    words = {word: next(iter(found)) for word, found in numbers.items()} | {_LAYER: layer}
    return re.sub(r"\{([a-z]+)\}", lambda match: str(words.get(match[1], match[0])), entry.name)
