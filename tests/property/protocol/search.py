"""Breadth-first search through all states of a system, and the shortest way to a state that breaks a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """A transition.

    Attributes:
        name: what happens, for people.
        after: the state that follows.
        is_fault: True if it need not happen for the system to go on.
    """

    name: str
    after: Hashable
    is_fault: bool = False


class ViolationError(Exception):
    """A transition breaks a rule."""


class CounterexampleError(AssertionError):
    """A rule is broken; the message lists the steps from the beginning."""

    def __init__(self, problem: str, steps: Sequence[str]) -> None:
        lines = [f"{number:3}. {step}" for number, step in enumerate(steps, 1)]
        super().__init__("\n".join([problem, *lines]))
        self.problem = problem
        self.steps = tuple(steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explored:
    """Result of a search that has found no broken rule."""

    num_states: int
    num_steps: int
    num_good: int


def explore(
    start: Hashable,
    successors: Callable[[Hashable], Iterable[Step]],
    check: Callable[[Hashable, Step], None],
    is_good: Callable[[Hashable], bool],
    max_states: int,
) -> Explored:
    """Visit every state that can be reached from `start`, and check every transition.

    Args:
        start: the first state.
        successors: returns all transitions from a state.
        check: raises ViolationError if a transition breaks a rule.
        is_good: whether a state is one that the system has to reach.
        max_states: bound; more states are an error, because then not everything was visited.

    Raises:
        CounterexampleError: a transition breaks a rule, or no good state can be reached from some state without faults.
    """
    numbers: dict[Hashable, int] = {start: 0}
    states: list[Hashable] = [start]
    parents: list[tuple[int, str]] = [(-1, "")]
    predecessors: list[list[int]] = [[]]
    num_steps = at = 0
    while at < len(states):
        for step in successors(states[at]):
            num_steps += 1
            number = numbers.get(step.after)
            try:
                check(states[at], step)
            except ViolationError as error:
                raise CounterexampleError(str(error), [*_steps(parents, at), step.name]) from None
            if number is None:
                number = numbers[step.after] = len(states)
                states.append(step.after)
                parents.append((at, step.name))
                predecessors.append([])
                assert number < max_states, f"expected at most {max_states} states"
            if not step.is_fault:
                predecessors[number].append(at)
        at += 1
    good = [number for number, state in enumerate(states) if is_good(state)]
    _check_progress(good, parents, predecessors)
    return Explored(num_states=len(states), num_steps=num_steps, num_good=len(good))


def _check_progress(good: list[int], parents: list[tuple[int, str]], predecessors: list[list[int]]) -> None:
    reaches = bytearray(len(parents))
    todo = list(good)
    for number in good:
        reaches[number] = 1
    while todo:
        for before in predecessors[todo.pop()]:
            if not reaches[before]:
                reaches[before] = 1
                todo.append(before)
    stuck = reaches.find(0)
    if stuck >= 0:
        problem = "the job cannot go on from here, even if no further fault happens"
        raise CounterexampleError(problem, _steps(parents, stuck))


def _steps(parents: list[tuple[int, str]], at: int) -> list[str]:
    names: list[str] = []
    while at > 0:
        at, name = parents[at]
        names.append(name)
    return names[::-1]
