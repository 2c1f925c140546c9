"""Name maps as data: rules from names to names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from reshard.errors import UnsupportedError
from reshard.names.template import Template


class Cut(NamedTuple):
    """A box of a rule's whole tensor, along its dim, and its place in the tensor of one part.

    Attributes:
        part: which of the parts.
        whole: first element in the whole.
        local: first element in the part.
        size: number of elements.
    """

    part: int
    whole: int
    local: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of a name map.

    One source and one target: the tensor gets another name. Several targets: the source is cut into them. Several
    sources: they are put together. No target: the tensor is dropped.

    Attributes:
        sources: names before.
        targets: names after.
        dim: along which the whole is made of its parts.
        groups: how often the sequence of parts is repeated in the whole: 1 where each part is in one piece, the number
            of heads where each head has its query, key and value together.
        sizes: elements of each part along `dim` in one group; None where they are equal or as found.
        equal: all parts are equally large.
        stacked: the whole has a dim more than its parts, and each part is one step along it.
        joins: the sources are the parts; else the targets are.
    """

    sources: tuple[Template, ...]
    targets: tuple[Template, ...]
    dim: int = 0
    groups: int = 1
    sizes: tuple[int, ...] | None = None
    equal: bool = False
    stacked: bool = False
    joins: bool = False

    @property
    def is_rename(self) -> bool:
        """True if the rule only changes the name: it cuts, joins and drops nothing."""
        return len(self.sources) == len(self.targets) == 1 and not self.stacked

    @property
    def parts(self) -> int:
        """Number of tensors that the whole is made of."""
        return max(len(self.sources), len(self.targets))

    def inverse(self) -> Rule:
        """Return the rule that undoes this one.

        Raises:
            UnsupportedError: the rule drops tensors, or does not give the sizes of its parts.
        """
        if not self.targets:
            raise UnsupportedError(f"{self} has no inverse: what is dropped cannot be had back")
        if self.is_rename:
            return dataclasses.replace(self, sources=self.targets, targets=self.sources)
        if self.joins and self.sizes is None and not self.equal and not self.stacked:
            raise UnsupportedError(f"{self} has no inverse: it does not say how large its parts are", hint="give sizes")
        return dataclasses.replace(self, sources=self.targets, targets=self.sources, joins=not self.joins)

    def cuts(self, sizes: Sequence[int]) -> list[Cut]:
        """Return all cuts of the whole in order, for parts of these sizes in each group, `[parts]`."""
        cuts: list[Cut] = []
        whole = 0
        for group in range(self.groups):
            for part, size in enumerate(sizes):
                cuts.append(Cut(part, whole, group * size, size))
                whole += size
        return cuts

    def __str__(self) -> str:
        left, right = (", ".join(map(str, names[:4])) for names in (self.sources, self.targets))
        return f"rule {left!r} -> {right!r}" if self.targets else f"rule drop {left!r}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """The names of a checkpoint's tensors in another program.

    Attributes:
        rules: each tensor must be matched by exactly one.
        tied: (second name, name) after the map: second names that the target gives to a tensor.
        untied: (second name, name) before the map: second names of the source that are left out.
        path: file that it was read from, for messages.
    """

    rules: tuple[Rule, ...]
    tied: tuple[tuple[str, str], ...] = ()
    untied: tuple[tuple[str, str], ...] = ()
    path: str = ""

    def inverse(self) -> NameMap:
        """Return the map that undoes this one.

        Raises:
            UnsupportedError: naming the rules that cannot be undone.
        """
        problems: list[str] = []
        rules: list[Rule] = []
        for rule in self.rules:
            try:
                rules.append(rule.inverse())
            except UnsupportedError as error:
                problems.append(str(error))
        if problems:
            raise UnsupportedError("the name map has no inverse", path=self.path or None, problems=problems)
        return NameMap(rules=tuple(rules), tied=self.untied, untied=self.tied, path=self.path)
