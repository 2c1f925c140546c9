"""Convert a run's progress from a source of another format to the form of a DeepSpeed checkpoint like the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError
from reshard.formats.pt.objects import Tensor, new_tensor
from reshard.tensors.layout import Index, ParamGroup

_KINDS = {"float64": "<f8", "float32": "<f4", "int64": "<i8", "int32": "<i4"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Facts besides tensors about the source's run: its progress, and the settings of its parameter groups.

    Attributes:
        step: optimizer steps done.
        samples: global samples consumed.
        groups: the source's parameter groups.
        aliases: second name of a tied weight -> its first.
        where: the source, for messages.
    """

    step: int
    samples: int
    groups: tuple[ParamGroup, ...]
    aliases: Mapping[str, str]
    where: str

    @classmethod
    def of(cls, index: Index, aliases: Mapping[str, str]) -> Progress:
        """Return the progress that `index` states; `aliases` are those of the checkpoint like the target."""
        return cls(
            step=index.step,
            samples=index.samples,
            groups=index.groups,
            aliases={**index.aliases, **aliases},
            where=str(index.root),
        )

    def settings(self, names: Sequence[str], like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a parameter group: the source's, or those of `like` that the source lacks.

        Raises:
            UnsupportedError: the group's parameters have different settings in the source.
        """
        options = self._common(names, "options")
        return {key: _convert_to(options[key], value) if key in options else value for key, value in like.items()}

    def scalars(self, names: Sequence[str], like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of a parameter group that are one number.

        Raises:
            UnsupportedError: the group's parameters have different scalars in the source.
        """
        scalars = self._common(names, "scalars") or {"step": self.step}
        return {key: _convert_to(scalars[key], value) if key in scalars else value for key, value in like.items()}

    def _common(self, names: Sequence[str], what: str) -> Mapping[str, Any]:
        wanted = {self.aliases.get(name, name) for name in names}
        own = [group for group in self.groups if wanted & {self.aliases.get(name, name) for name in group.names}]
        values: list[Mapping[str, Any]] = [getattr(group, what) for group in own]
        differing = sorted({key for value in values for key in value if value[key] != values[0].get(key)})
        if differing:
            raise UnsupportedError(
                f"the source has {len(own)} parameter groups for the parameters of one group, such as {names[0]},"
                f" with different {what} {', '.join(differing)}",
                path=self.where,
                hint="name with --like a checkpoint that has the source's parameter groups",
            )
        return values[0] if values else {}


def _convert_to(value: Any, like: Any) -> Any:
    """Convert a value to the form of `like` in DeepSpeed's file: a tensor without dims, an int, a float, a tuple."""
    if isinstance(like, Tensor):
        if like.dtype not in _KINDS:
            return like
        data = np.array(value, dtype=_KINDS[like.dtype]).tobytes()
        return new_tensor(like.dtype, like.shape, data)
    if isinstance(like, tuple) and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    if type(like) is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
