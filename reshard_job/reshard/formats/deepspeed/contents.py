"""What a native DeepSpeed checkpoint is, once all its files are read (metadata only)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.experts import Experts
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile
from reshard.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedContents:
    """A checkpoint as found.

    Attributes:
        folder: where it is.
        topology: that it was written in.
        prefix: `bf16_` or empty, before the names of the optimizer files.
        pipeline: written by a PipelineModule (weights are in layer files).
        model_axis: layer files name the tensor-parallel rank.
        models: (model-parallel rank, data-parallel rank) -> model file; the latter is 0 below ZeRO-3.
        optimizers: (model-parallel rank, data-parallel rank) -> optimizer file; empty at ZeRO-0.
        layers: (layer, tensor-parallel rank) -> layer file.
        expert_files: (layer of experts, expert) -> file with its weights.
        experts: the model's experts, or None.
        named: at ZeRO-0, model-parallel rank -> names and shapes of each parameter group.
        unread: why its optimizer is taken for one without groups (`weights_alone`), or None.
    """

    folder: Path
    topology: Topology
    prefix: str
    pipeline: bool
    model_axis: bool
    models: Mapping[tuple[int, int], PtFile]
    optimizers: Mapping[tuple[int, int], PtFile]
    layers: Mapping[tuple[int, int], PtFile]
    named: Mapping[int, Sequence[Mapping[str, tuple[int, ...]]]]
    expert_files: Mapping[tuple[int, int], PtFile] = dataclasses.field(default_factory=dict)
    experts: Experts | None = None
    unread: UnsupportedError | None = None

    @property
    def files(self) -> tuple[PtFile, ...]:
        """All files, in the order of their names' ranks."""
        return (
            *self.models.values(),
            *self.optimizers.values(),
            *self.layers.values(),
            *self.expert_files.values(),
        )

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.models[0, 0].value["global_steps"])

    @property
    def samples(self) -> int:
        """Global samples consumed."""
        value = self.models[0, 0].value.get("global_samples", 0)
        return value if isinstance(value, int) else 0

    def optimizer_file(self, mp: int, dp: int) -> PtFile:
        """The file with the optimizer of one rank; at ZeRO-0 the model file."""
        return self.optimizers[mp, dp] if self.optimizers else self.models[mp, 0]

    def optimizer(self, mp: int, dp: int) -> Mapping[str, Any]:
        """The state of one rank's optimizer as saved."""
        if self.unread is not None:
            return {}
        return mapping_of(self.optimizer_file(mp, dp), "optimizer_state_dict" if self.optimizers else "optimizer")

    def partition(self, names: Sequence[str], dp: int) -> tuple[int, int]:
        """How many partitions a parameter group has, and which of them a data-parallel rank holds."""
        return partition_of(names, self.experts, self.topology, dp)

    def whole_name(self, name: str, dp: int) -> str:
        """Name in the whole model of what a data-parallel rank calls `name`."""
        return name if self.experts is None else self.experts.whole_name(name, self.topology.ep, dp % self.topology.ep)

    @property
    def half_type(self) -> str | None:
        """`bfloat16` or `float16`, or None for fp32 training.

        The weights need not tell: adapters (LoRA) stay in fp32 at ZeRO-3, and are all that is saved of some models.
        """
        if self.prefix:  # engine.py, `_get_zero_ckpt_prefix`: bf16 is enabled
            return "bfloat16"
        for section, half in (("bf16", "bfloat16"), ("fp16", "float16")):
            settings = self.config.get(section)
            if isinstance(settings, Mapping) and settings.get("enabled") is True:
                return half
        file = next(iter(self.layers.values()), None)
        weights = self.models[0, 0].value["module"] if file is None else file.value
        types = {tensor.dtype for tensor in weights.values() if isinstance(tensor, Tensor)}
        return next((half for half in ("bfloat16", "float16") if half in types), None)

    @property
    def config(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration as saved; empty where it was not."""
        value = self.models[0, 0].value.get("ds_config")
        return value if isinstance(value, Mapping) else {}

    @property
    def zero_config(self) -> Mapping[str, Any]:
        """Its `zero_optimization` section."""
        value = self.config.get("zero_optimization")
        return value if isinstance(value, Mapping) else {}


def partition_of(names: Sequence[str], experts: Experts | None, topology: Topology, dp: int) -> tuple[int, int]:
    """Number of partitions of a group, and that of a rank; experts are partitioned over the ranks that hold them.

    Raises:
        UnsupportedError: experts and others in one group.
    """
    if experts is None:
        return topology.dp, dp
    found = {experts.holds(name) for name in names}
    if len(found) > 1:
        raise UnsupportedError(f"a parameter group holds experts and others: {names[0]}, ...")
    return (topology.dp // topology.ep, dp // topology.ep) if True in found else (topology.dp, dp)


def mapping_of(file: PtFile, key: str) -> Mapping[str, Any]:
    """A dict in a file.

    Raises:
        CorruptSourceError: it is missing, or no dict.
    """
    value = file.value.get(key) if isinstance(file.value, Mapping) else None
    if not isinstance(value, Mapping):
        raise CorruptSourceError(f"has no {key}", path=file.path)
    return value
