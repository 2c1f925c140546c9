"""Match the parameters of an optimizer that numbers them with the names of the module, if there is only one way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from reshard.errors import UnsupportedError

Shape = tuple[int, ...]
_MAX_STATES = 1 << 20
_Taken = tuple[int, ...]
_Ways = dict[_Taken, tuple[int, _Taken | None, int]]
"""Parameters that each group took -> number of ways (2: or more), previous state, last group that took (-1: none)."""


def match_names(
    groups: Sequence[Sequence[Shape]], candidates: Sequence[tuple[str, Shape]], path: str
) -> list[list[str]]:
    """Find the names of the optimizer's parameters; every group has them in the module's order.

    Args:
        groups: shape of each parameter, `[groups][params]`.
        candidates: names and shapes in the module's order, with those that are not optimized.
        path: of the file, for messages.

    Raises:
        UnsupportedError: no assignment of names to groups fits, or more than one.
    """
    done = tuple(len(group) for group in groups)
    spare = len(candidates) - sum(done)

    def steps(at: int, taken: _Taken) -> Iterator[tuple[int, _Taken]]:
        for group, count in enumerate(taken):
            if count < done[group] and groups[group][count] == candidates[at][1]:
                yield group, _add(taken, group, 1)
        if at - sum(taken) < spare:  # a frozen parameter or a buffer
            yield -1, taken

    what = f"its optimizer numbers its {sum(done)} parameters and does not name them", "shapes"
    return _find_only_way([name for name, _ in candidates], done, steps, what, path)


def match_sizes(sizes: Sequence[int], candidates: Sequence[tuple[str, int]], path: str) -> list[list[str]]:
    """Find the names of the parameters in flat groups, of which only the number of elements is known.

    Args:
        sizes: elements of each group.
        candidates: names and numbers of elements in the module's order.
        path: of the file, for messages.

    Raises:
        UnsupportedError: no assignment of names to groups fits, or more than one.
    """
    done = tuple(sizes)
    spare = sum(size for _, size in candidates) - sum(done)
    before = [0]
    for _, size in candidates:
        before.append(before[-1] + size)

    def steps(at: int, taken: _Taken) -> Iterator[tuple[int, _Taken]]:
        size = candidates[at][1]
        for group, count in enumerate(taken):
            if count + size <= done[group]:
                yield group, _add(taken, group, size)
        if before[at + 1] - sum(taken) <= spare:
            yield -1, taken

    what = f"its optimizer holds {len(done)} flat groups and does not name their parameters", "sizes"
    return _find_only_way([name for name, _ in candidates], done, steps, what, path)


def _add(taken: _Taken, group: int, count: int) -> _Taken:
    return (*taken[:group], taken[group] + count, *taken[group + 1 :])


def _find_only_way(
    names: Sequence[str],
    done: _Taken,
    steps: Callable[[int, _Taken], Iterator[tuple[int, _Taken]]],
    what: tuple[str, str],
    path: str,
) -> list[list[str]]:
    """Give each name to a group or to none, in order, until the groups have taken `done`.

    Raises:
        UnsupportedError: there is no way, or more than one.
    """
    ways: list[_Ways] = [{(0,) * len(done): (1, None, -1)}]
    num_states = 0
    for at in range(len(names)):
        after: _Ways = {}
        for state, (count, _, _) in ways[-1].items():
            for group, taken in steps(at, state):
                known = after.get(taken)
                after[taken] = (count, state, group) if known is None else (min(2, known[0] + count), state, group)
        num_states += len(after)
        if num_states > _MAX_STATES:
            raise UnsupportedError(f"{len(done)} parameter groups cannot be told apart by {what[1]}", path=path)
        ways.append(after)
    total = ways[-1].get(done, (0, None, -1))[0]
    if total != 1:
        raise UnsupportedError(
            f"{what[0]}: {'no assignment' if total == 0 else 'more than one assignment'}"
            f" of the module's names to the parameter groups fits their {what[1]}",
            path=path,
            hint="train with ZeRO stage 1, or build the optimizer from named_parameters()",
        )
    groups: list[list[str]] = [[] for _ in done]
    state = done
    for at in range(len(names) - 1, -1, -1):
        _, before, group = ways[at + 1][state]
        if group >= 0:
            groups[group].append(names[at])
        assert before is not None
        state = before
    return [group[::-1] for group in groups]
