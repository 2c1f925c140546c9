"""The contents of a native DeepSpeed checkpoint after all its files were read (metadata only)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.autoep import find_part
from reshard.formats.deepspeed.experts import Experts
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile
from reshard.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedContents:
    """The files of a native checkpoint, and the facts in which they agree.

    Attributes:
        folder: of the checkpoint.
        topology: of the run that wrote it.
        prefix: `bf16_` or empty, before the names of the optimizer files.
        pipeline: written by a PipelineModule. Its weights are in layer files; with experts, in `module` of each stage.
        model_axis: layer files name the tensor-parallel rank.
        models: (model-parallel rank, data-parallel rank) -> model file; the latter is 0 below ZeRO-3.
        optimizers: (model-parallel rank, data-parallel rank) -> optimizer file; empty at ZeRO-0.
        layers: (layer, tensor-parallel rank) -> layer file.
        expert_files: (layer of experts, expert) -> file with its weights; layers are counted over all stages.
        expert_copies: the other files of the same experts, which further tensor-parallel ranks save.
        experts: the model's experts, or None.
        named: at ZeRO-0, model-parallel rank -> names and shapes of each parameter group.
        settings: of each parameter group of an elastic checkpoint, which keeps none, from DeepSpeed's configuration.
        unread: why only the weights are read and not the optimizer (`drop_optimizer`), or None.
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
    expert_copies: Mapping[tuple[int, int], tuple[PtFile, ...]] = dataclasses.field(default_factory=dict)
    experts: Experts | None = None
    settings: tuple[Mapping[str, Any], ...] = ()
    unread: UnsupportedError | None = None

    @property
    def files(self) -> tuple[PtFile, ...]:
        """Return all files, in the order of the ranks in their names."""
        return (
            *self.models.values(),
            *self.optimizers.values(),
            *self.layers.values(),
            *self.expert_files.values(),
            *(file for files in self.expert_copies.values() for file in files),
        )

    @property
    def has_modules(self) -> bool:
        """Return whether `module` of each model-parallel rank's model file has its weights, and layer files do not."""
        return not self.layers

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done."""
        return self._count("global_steps")

    @property
    def samples(self) -> int:
        """Return the number of global samples consumed."""
        is_stated = isinstance(self.models[0, 0].value.get("global_samples"), int)
        return self._count("global_samples") if is_stated else 0

    def _count(self, key: str) -> int:
        value = self.models[0, 0].value[key]
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise UnsupportedError(
                f"{key}: expected a whole number from 0 to 2^63 - 1, found {value!r:.40}", path=self.models[0, 0].path
            )
        return value

    def optimizer_file(self, mp: int, dp: int) -> PtFile:
        """Return the file with the optimizer of one rank; at ZeRO-0 it is the model file."""
        return self.optimizers[mp, dp] if self.optimizers else self.models[mp, 0]

    def optimizer(self, mp: int, dp: int) -> Mapping[str, Any]:
        """Return the state of one rank's optimizer as saved."""
        if self.unread is not None:
            return {}
        return require_mapping(self.optimizer_file(mp, dp), "optimizer_state_dict" if self.optimizers else "optimizer")

    def partition(self, names: Sequence[str], dp: int, tp: int = 0) -> tuple[int, int]:
        """Return how many partitions a parameter group has, and which of them a rank holds."""
        return find_partition(names, self.experts, self.topology, dp, tp)

    def whole_name(self, name: str, dp: int) -> str:
        """Return the name in the whole model of the parameter that a data-parallel rank calls `name`."""
        return name if self.experts is None else self.experts.whole_name(name, self.topology.ep, dp % self.topology.ep)

    def is_stacked(self, name: str) -> bool:
        """Return whether a parameter is a stack of experts, which expert parallelism cuts and nothing else."""
        return self.experts is not None and name in self.experts.stacked

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter is one of an expert, which `module` lacks."""
        return self.experts is not None and self.experts.holds(name)

    @property
    def half_type(self) -> str | None:
        """Return `bfloat16` or `float16`, or None for fp32 training.

        The types of the weights come last: adapters (LoRA) stay in fp32 at ZeRO-3, and some models save nothing else.
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
        """Return DeepSpeed's configuration as saved; empty if it was not saved."""
        value = self.models[0, 0].value.get("ds_config")
        return value if isinstance(value, Mapping) else {}

    @property
    def zero_config(self) -> Mapping[str, Any]:
        """Return the section `zero_optimization` of DeepSpeed's configuration."""
        value = self.config.get("zero_optimization")
        return value if isinstance(value, Mapping) else {}


def find_partition(
    names: Sequence[str], experts: Experts | None, topology: Topology, dp: int, tp: int = 0
) -> tuple[int, int]:
    """Return how many partitions a group has, and which of them a rank holds.

    Experts are partitioned over the ranks that hold them, other parameters over all ranks.

    Raises:
        UnsupportedError: a group has experts and other parameters.
    """
    if experts is None:
        return topology.dp, dp
    are_experts = {experts.holds(name) for name in names}
    if len(are_experts) > 1:
        raise UnsupportedError(f"a parameter group holds experts and others: {names[0]}, ...")
    if True not in are_experts:
        return topology.dp, dp
    return topology.dp * topology.tp // topology.ep, find_part(topology, dp, tp)[1]


def require_mapping(file: PtFile, key: str) -> Mapping[str, Any]:
    """Return the dict that a file has under a key.

    Raises:
        CorruptSourceError: the key is missing, or its value is no dict.
    """
    value = file.value.get(key) if isinstance(file.value, Mapping) else None
    if not isinstance(value, Mapping):
        raise UnsupportedError(f"has no {key}", path=file.path)
    return value
