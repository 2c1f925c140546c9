"""Match regular expressions from a checkpoint in time linear in the text.

Python's own engine backtracks at every choice, so that a short pattern and a short name can take exponential time.
Here a pattern becomes an automaton whose states are followed in parallel (Thompson 1968). The successors of a set of
states are cached (Cox, "Regular Expression Matching Can Be Simple And Fast", 2007). Python's parser reads the patterns,
so that they mean the same as in DeepSpeed. Constructs that an automaton cannot follow (references to groups, lookahead,
lookbehind, possessive repeats) are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MOST_PATTERNS = 512
"""Limit on the patterns of one list, without those that name a single parameter, which DeepSpeed's AutoTP writes."""

_MOST_CHARACTERS = 4096
_MOST_STATES = 4096
_MOST_REMEMBERED = 1024
_FREE_STEPS = 1 << 20
_STEPS_PER_CHARACTER = 4
_IGNORECASE, _DOTALL, _ASCII = int(re.IGNORECASE), int(re.DOTALL), int(re.ASCII)
_FLAGS = _IGNORECASE | _DOTALL | _ASCII
_KNOWN_FLAGS = _FLAGS | int(re.UNICODE | re.VERBOSE)
_EXACT = re.compile(r"\^((?:[\w/ ]|\\\W)*)\$", re.ASCII)
"""`re.escape` of a name, from its start to its end."""

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_parser: Any = importlib.import_module("re._parser")

_START, _WORD, _OTHER = range(3)
"""Kinds of what is before a position: the start of the text, a word character, another character."""

_END, _LAST_BREAK = "", "\n$"
"""Symbols after a position that are no plain character: the end of the text, and a line break at the end."""


class PatternError(ValueError):
    """The pattern is no regular expression, or uses a construct that is not supported."""


class PatternSet:
    """Patterns that match names as in DeepSpeed: by `re.match`, from the start of the name.

    Raises:
        PatternError: one of them is refused, or there are too many.
    """

    def __init__(self, patterns: Iterable[object]) -> None:
        self._exact: dict[str, list[int]] = {}
        self._others: list[tuple[int, Matcher]] = []
        for number, pattern in enumerate(patterns):
            if not isinstance(pattern, str):
                raise PatternError(f"pattern {pattern!r:.80} is not a string")
            if exact := _EXACT.fullmatch(pattern):
                self._exact.setdefault(_ESCAPE.sub(r"\1", exact[1]), []).append(number)
            else:
                self._others.append((number, Matcher(pattern)))
        if len(self._others) > MOST_PATTERNS:
            raise PatternError(f"{len(self._others)} patterns in one list: at most {MOST_PATTERNS} are matched")

    def find(self, name: str) -> list[int]:
        """Return the positions of the patterns that match a name, ascending."""
        numbers = [*self._exact.get(name, ())]
        if name.endswith("\n"):  # `$` also matches before a line break at the end
            numbers += self._exact.get(name[:-1], ())
        numbers += [number for number, matcher in self._others if matcher.match(name)]
        return sorted(numbers)


class Matcher:
    """One compiled pattern.

    Args:
        pattern: a regular expression of Python.
        flags: of the module `re`.
        anywhere: match anywhere in the text (`re.search`), not only at its start (`re.match`).

    Raises:
        PatternError: the pattern is refused; the message names it.
    """

    def __init__(self, pattern: str, flags: int = 0, *, anywhere: bool = False) -> None:
        self._pattern = pattern
        program, self._literal = _compile(pattern, int(flags))
        self._program = program
        self._anywhere = anywhere
        self._steps_left = _FREE_STEPS
        self._sets: dict[tuple[frozenset[int], int], _States] = {}

    def match(self, text: str) -> bool:
        """Return whether the pattern matches.

        Raises:
            PatternError: matching takes too many steps for a text of this length.
        """
        if self._literal not in text:
            return False
        self._steps_left += _STEPS_PER_CHARACTER * len(text)
        here = self._states(frozenset((0,)), _START)
        last = len(text) - 1
        for at, character in enumerate(text):
            symbol = _LAST_BREAK if at == last and character == "\n" else character
            following = here.after.get(symbol)
            if following is None:
                following = self._step(here, symbol)
            if isinstance(following, bool):
                return following
            here = following
        return self._step(here, _END) is True

    def _states(self, numbers: frozenset[int], before: int) -> _States:
        key = numbers, before
        if key not in self._sets:
            if len(self._sets) >= _MOST_REMEMBERED:
                self._sets.clear()
            self._sets[key] = _States(numbers, before)
        return self._sets[key]

    def _step(self, here: _States, symbol: str) -> _States | bool:
        """Follow all states over one character; return the next states, True for a match, False if none is left."""
        reached = self._reach(here, symbol)
        following: _States | bool
        if _MATCH in reached:
            following = True
        elif symbol == _END:
            following = False
        else:
            character = symbol[0]
            numbers = {number + 1 for number in reached if self._program[number].accepts(character)}
            numbers |= {0} if self._anywhere else set()
            following = self._states(frozenset(numbers), _kind(character)) if numbers else False
        here.after[symbol] = following
        return following

    def _reach(self, here: _States, symbol: str) -> set[int]:
        """Return all states that are reached from `here` without consuming a character, if `symbol` comes next."""
        seen: set[int] = set()
        todo = list(here.numbers)
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            todo += self._program[number].goes_to(here.before, symbol) if number != _MATCH else ()
        self._steps_left -= len(seen) + 1
        if self._steps_left < 0:
            raise PatternError(f"pattern {self._pattern!r:.80}: it takes too much work to match it")
        return seen


_MATCH = -1
"""Number of the state in which the pattern has matched."""


@dataclasses.dataclass(eq=False, slots=True)
class _States:
    """States that are followed in parallel, and their cached successors at each symbol."""

    numbers: frozenset[int]
    before: int
    after: dict[str, _States | bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _State:
    """One state of the automaton.

    Attributes:
        to: states that are reached without consuming a character, if `node` is None.
        at: assertion about the position that `to` needs (the parser's name), empty for none.
        node: parsed node that says which characters are consumed; the following state has the next number.
        flags: of the pattern at this node.
    """

    to: list[int] = dataclasses.field(default_factory=list)
    at: str = ""
    node: tuple[str, Any] | None = None
    flags: int = 0
    known: dict[str, bool] = dataclasses.field(default_factory=dict)

    def accepts(self, character: str) -> bool:
        """Return whether this state consumes the character."""
        is_accepted = self.known.get(character)
        if is_accepted is None:
            if len(self.known) >= _MOST_REMEMBERED:
                self.known.clear()
            is_accepted = self.node is not None and _accepts(*self.node, character, self.flags)
            self.known[character] = is_accepted
        return is_accepted

    def goes_to(self, before: int, symbol: str) -> Sequence[int]:
        """Return the states that are reached from this one without consuming a character."""
        return self.to if self.node is None and (not self.at or _holds(self.at, before, symbol, self.flags)) else ()


@functools.lru_cache(maxsize=4 * MOST_PATTERNS)
def _compile(pattern: str, flags: int) -> tuple[list[_State], str]:
    """Return the automaton of a pattern, and a text that every match contains."""
    if len(pattern) > _MOST_CHARACTERS:
        raise PatternError(f"pattern {pattern!r:.80}: {len(pattern)} characters, at most {_MOST_CHARACTERS} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern, flags)
        builder = _Builder(pattern)
        pattern_flags = parsed.state.flags
        builder.check_flags(pattern_flags)
        builder.add(parsed, pattern_flags & _FLAGS)
    except (re.error, RecursionError, OverflowError) as error:
        why = str(error) if isinstance(error, re.error) else "nested too deeply"
        raise PatternError(f"pattern {pattern!r:.80}: {why}") from error
    builder.states.append(_State(to=[_MATCH]))
    return builder.states, "" if pattern_flags & _IGNORECASE else _find_literal(parsed)


def _find_literal(parsed: Any) -> str:
    """Return the longest text that every match contains literally."""
    texts = [""]
    for op, value in parsed:
        if str(op) == "LITERAL":
            texts[-1] += chr(value)
        elif str(op) != "AT":
            texts.append("")
    return max(texts, key=len)


class _Builder:
    """Builds the states of an automaton from the nodes of Python's parser."""

    def __init__(self, pattern: str) -> None:
        self.states: list[_State] = []
        self._pattern = pattern
        self._left = _MOST_STATES

    def error(self, what: str) -> PatternError:
        return PatternError(f"pattern {self._pattern!r:.80}: {what} is not matched here")

    def check_flags(self, flags: int) -> None:
        if other := flags & ~_KNOWN_FLAGS:
            raise self.error(f"the flag {re.RegexFlag(other)!r}")

    def new(self, state: _State) -> int:
        """Append a state and return its number; raise PatternError if there are too many."""
        self._spend()
        self.states.append(state)
        return len(self.states) - 1

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise PatternError(f"pattern {self._pattern!r:.80}: more than {_MOST_STATES} states, with repeats unrolled")

    def add(self, parsed: Any, flags: int) -> None:
        """Append the states of a sequence; its successor is the state that is appended next."""
        for op, value in parsed:
            name = str(op)
            if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                self.new(_State(node=(name, value), flags=flags))
            elif name == "AT":
                number = self.new(_State(at=str(value), flags=flags))
                self.states[number].to.append(number + 1)
            elif name == "SUBPATTERN":
                _, more, less, inner = value
                self.check_flags(more | less)
                self.add(inner, (flags | more & _FLAGS) & ~less)
            elif name == "BRANCH":
                self._branch(value[1], flags)
            elif name in ("MAX_REPEAT", "MIN_REPEAT"):  # whether there is a match does not depend on greediness
                least, most, inner = value
                self._repeat(least, most, inner, flags)
            else:
                raise self.error(name.lower().replace("_", " "))

    def _branch(self, ways: Sequence[Any], flags: int) -> None:
        split = self.new(_State())
        ends = []
        for way in ways:
            self.states[split].to.append(len(self.states))
            self.add(way, flags)
            ends.append(self.new(_State()))
        for end in ends:
            self.states[end].to.append(len(self.states))

    def _repeat(self, least: int, most: int, inner: Any, flags: int) -> None:
        for _ in range(least):
            self._spend()
            self.add(inner, flags)
        if most == _parser.MAXREPEAT:
            split = self.new(_State())
            self.states[split].to.append(split + 1)
            self.add(inner, flags)
            self.states[self.new(_State())].to.append(split)
            self.states[split].to.append(len(self.states))
            return
        splits = []
        for _ in range(most - least):
            splits.append(self.new(_State()))
            self.states[splits[-1]].to.append(splits[-1] + 1)
            self.add(inner, flags)
        for split in splits:
            self.states[split].to.append(len(self.states))


def _kind(character: str) -> int:
    return _WORD if character.isalnum() or character == "_" else _OTHER


def _holds(at: str, before: int, symbol: str, flags: int) -> bool:
    """Return whether an assertion holds between the kind before a position and the symbol after it."""
    if at in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return before == _START
    if at == "AT_END":
        return symbol in (_END, _LAST_BREAK)
    if at == "AT_END_STRING":
        return symbol == _END
    behind = symbol != _END and _kind(symbol[0]) == _WORD
    return ((before == _WORD) != behind) is (at == "AT_BOUNDARY")


def _accepts(op: str, value: Any, character: str, flags: int) -> bool:
    if op == "ANY":
        return bool(flags & _DOTALL) or character != "\n"
    variants = set(_variants(character)) if flags & _IGNORECASE else {character}
    if op == "IN":
        negated = str(value[0][0]) == "NEGATE"
        items = value[1:] if negated else value
        return negated is not any(_is_in(str(kind), item, one, flags) for kind, item in items for one in variants)
    return (op == "LITERAL") is (chr(value) in variants)


def _variants(character: str) -> Iterator[str]:
    yield character
    for other in (character.lower(), character.upper()):
        if len(other) == 1:
            yield other


def _is_in(kind: str, item: Any, character: str, flags: int) -> bool:
    """Return whether a character belongs to an item of a class in brackets."""
    if kind == "LITERAL":
        return ord(character) == int(item)
    if kind == "RANGE":
        return bool(item[0] <= ord(character) <= item[1])
    name = str(item).removeprefix("CATEGORY_")
    known = not flags & _ASCII or character.isascii()
    word = name.removeprefix("NOT_")
    if word == "WORD":
        inside = _kind(character) == _WORD
    else:
        inside = character.isdecimal() if word == "DIGIT" else character.isspace()
    return (known and inside) is not name.startswith("NOT_")
