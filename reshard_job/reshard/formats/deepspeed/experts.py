"""Map the names of native experts (deepspeed/moe, 0.19.8) between ranks and the whole model.

Expert parallelism of degree `ep` splits the data-parallel ranks into `ep` groups. Rank `dp` is number `dp // ep` of the
ranks that hold the experts of part `dp % ep` (utils/groups.py, `_create_expert_and_data_parallel`). A rank counts its
own experts from 0. The whole model counts all of them, as the files of their weights do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import CorruptSourceError, UnsupportedError

_EXPERT = re.compile(r"^(.+\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a model.

    Attributes:
        counts: prefix of the names in a layer of experts -> number of experts.
        stacked: name of a parameter that is a stack of experts, `[experts, ...]` (AutoEP) -> number of experts.
    """

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stacked: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def holds(self, name: str) -> bool:
        """Return whether the parameter belongs to an expert or is a stack of experts."""
        return name in self.stacked or _EXPERT.match(name) is not None

    def check(self, ep: int) -> None:
        """Refuse a degree that does not divide the experts.

        Raises:
            UnsupportedError: the message names the layer.
        """
        for prefix, count in (*self.counts.items(), *self.stacked.items()):
            if count % ep:
                raise UnsupportedError(
                    f"ep={ep}: {prefix.rstrip('.')} has {count} experts, which {ep} does not divide",
                    hint="choose another ep",
                )

    def list_counts(self, names: Iterable[str]) -> list[int]:
        """Return the number of experts in each layer that some parameters belong to."""
        matches = (_EXPERT.match(name) for name in names)
        held = {match[1] for match in matches if match is not None}
        return [count for prefix, count in self.counts.items() if prefix in held]

    def whole_name(self, name: str, ep: int, part: int) -> str:
        """Convert a name on the ranks of one part to the name in the whole model; names without an expert stay."""
        match = _EXPERT.match(name)
        if match is None:
            return name
        own = self.counts[match[1]] // ep
        return f"{match[1]}{part * own + int(match[2])}{match[3]}"

    def local_names(self, names: Iterable[str], ep: int, part: int) -> dict[str, str]:
        """Select the names that the ranks of a part hold: name on those ranks -> name in the whole model."""
        local: dict[str, str] = {}
        for name in names:
            match = _EXPERT.match(name)
            if match is None:
                local[name] = name
                continue
            own = self.counts[match[1]] // ep
            if int(match[2]) // own == part:
                local[f"{match[1]}{int(match[2]) % own}{match[3]}"] = name
        return local

    def whole_order(self, local: Sequence[str], ep: int) -> tuple[str, ...]:
        """Return a group's names in the whole model, layer by layer and expert by expert.

        Args:
            local: the group's names on the ranks of the first part.
            ep: degree of expert parallelism.

        Raises:
            UnsupportedError: the group mixes layers, so that the order at another degree is not known.
        """
        if self.stacked:
            return tuple(local)
        layers: list[tuple[str, list[str]]] = []
        for name in local:
            match = _EXPERT.match(name)
            prefix = match[1] if match else ""
            if not layers or layers[-1][0] != prefix:
                layers.append((prefix, []))
            layers[-1][1].append(name)
        prefixes = [prefix for prefix, _ in layers]
        if len(set(prefixes)) != len(prefixes) or ("" in prefixes and len(prefixes) > 1):
            raise UnsupportedError(
                f"a parameter group mixes {prefixes[0] or 'dense parameters'} with others: the order of its parameters"
                " at another degree of expert parallelism is not known",
                hint="make groups by split_params_into_different_moe_groups_for_optimizer",
            )
        return tuple(
            self.whole_name(name, ep, part)
            for prefix, names in layers
            for part in range(ep if prefix else 1)
            for name in names
        )


def is_native(name: str) -> bool:
    """Return whether the name is that of one of DeepSpeed's own experts."""
    return _EXPERT.match(name) is not None


def find_experts(
    files: Mapping[tuple[int, int], Iterable[str]], local: Iterable[str], path: str
) -> tuple[Experts, int]:
    """Find the experts of a model and the degree of expert parallelism.

    Args:
        files: (layer, expert) -> names in its file.
        local: names of parameters on the first rank.
        path: of the checkpoint, for messages.

    Raises:
        CorruptSourceError: files of experts are missing, or hold something else.
        UnsupportedError: layers have different degrees.
    """
    layers: dict[str, int] = {}
    for (layer, expert), names in files.items():
        matches = [_EXPERT.match(name) for name in names]
        if not matches or any(match is None or int(match[2]) != expert for match in matches):
            raise CorruptSourceError(f"the file of expert {expert} of layer {layer} holds other names", path=path)
        if any(layers.setdefault(match[1], layer) != layer for match in matches if match):
            raise CorruptSourceError(f"layer {layer} of experts has the names of another layer", path=path)
    counts = {prefix: 1 + max(expert for at, expert in files if at == layer) for prefix, layer in layers.items()}
    own: dict[str, int] = {}
    for name in local:
        if match := _EXPERT.match(name):
            own[match[1]] = max(own.get(match[1], 0), 1 + int(match[2]))
    if unknown := sorted(own.keys() ^ counts.keys()):
        raise CorruptSourceError(f"the experts {unknown[0]}* are in files or in the optimizer only", path=path)
    degrees = {counts[prefix] / count for prefix, count in own.items()}
    if len(degrees) > 1:
        raise UnsupportedError(f"its layers of experts have different degrees {sorted(degrees)}", path=path)
    degree = degrees.pop() if degrees else 1.0
    if not degree.is_integer():
        raise CorruptSourceError(f"files hold {counts} experts, the first rank {own}", path=path)
    return Experts(counts=counts), int(degree)
