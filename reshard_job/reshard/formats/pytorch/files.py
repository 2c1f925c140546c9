"""Find the files of torch.save that hold a model's weights, among others that trainers write beside them.

Sources: transformers (`WEIGHTS_NAME`, `WEIGHTS_INDEX_NAME`: `pytorch_model.bin`, `pytorch_model.bin.index.json`), PEFT
(`adapter_model.bin`), accelerate (`pytorch_model_fsdp.bin`, of a full state dict), diffusers
(`diffusion_pytorch_model.bin`), and DeepSpeed's `zero_to_fp32.py`, which writes the names of transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

from reshard.errors import CorruptSourceError, UnsupportedError, make_read_error
from reshard.storage.files import open_file

NAME = "pytorch"
INDEX_SUFFIX = ".bin.index.json"
_KNOWN = ("pytorch_model.bin", "adapter_model.bin", "diffusion_pytorch_model.bin", "pytorch_model_fsdp.bin")
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"^.+-\d+-of-\d+\.bin$", re.ASCII)
_OTHERS = re.compile(
    r"^(optimizer|scheduler|scaler|sampler|dl_state_dict|training_args|rng_state|random_states|custom_checkpoint"
    r"|(bf16_)?zero_|mp_rank_|layer_|expp?_|expert_|model_optim_rng|common\.pt)|_states\.pt$"
)
"""Names of files with other content, or with parts of tensors, which trainers, DeepSpeed and Megatron write."""

_MAX_INDEX_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files with weights in a folder.

    Attributes:
        index: name of the file that says which tensor is in which file; empty if there is none.
        names: names of the files; empty if the index lists them.
        reason: why there are no weights to read; None if there are.
    """

    index: str = ""
    names: tuple[str, ...] = ()
    reason: str | None = None


def find_files(folder: Path) -> FoundFiles:
    """Find the weights in a folder, from the names of its files alone.

    A file without a known name counts only if it is the only one, in a folder without other folders: a folder of
    checkpoints is not taken for weights because somebody left a file in it.
    """
    try:
        listed = sorted(item.name for item in folder.iterdir() if not item.name.startswith("."))
        return _choose_files(folder, listed)
    except OSError as error:
        return FoundFiles(reason=f"cannot be listed: {error.strerror or error}")


def _choose_files(folder: Path, listed: list[str]) -> FoundFiles:
    indexes = [name for name in listed if name.endswith(INDEX_SUFFIX)]
    if indexes:
        if len(indexes) > 1:
            return FoundFiles(reason=f"holds {len(indexes)} models: {', '.join(indexes)}")
        return FoundFiles(index=indexes[0])
    known = [name for name in listed if name in _KNOWN]
    if len(known) == 1:
        return FoundFiles(names=(known[0],))
    others = [name for name in listed if name.endswith(_SUFFIXES) and not _OTHERS.search(name)]
    if known or len(others) > 1:
        shards = [name for name in others if _SHARD.match(name)]
        why = (
            f"no file *{INDEX_SUFFIX} beside {shards[0]}" if shards else f"several: {', '.join((known or others)[:5])}"
        )
        return FoundFiles(reason=f"cannot tell which file of torch.save holds the weights, {why}")
    if others and not any((folder / name).is_dir() for name in listed):
        return FoundFiles(names=(others[0],))
    return FoundFiles(reason="no file of torch.save with weights, such as pytorch_model.bin")


def read_weight_map(path: Path) -> Mapping[str, str]:
    """Read the file that says which tensor is in which file.

    Raises:
        CorruptSourceError: it is no such file, or names files outside of its folder.
    """
    try:
        with open_file(path) as file:
            if file.num_bytes > _MAX_INDEX_BYTES:
                raise UnsupportedError(f"is larger than {_MAX_INDEX_BYTES} bytes", path=str(path))
            value = json.loads(file.read(file.num_bytes, 0).decode("utf-8"))
    except OSError as error:
        raise make_read_error(error, str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CorruptSourceError(f"is no valid JSON: {error}", path=str(path)) from error
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedError("has no weight_map from tensors to files", path=str(path))
    outside = sorted({str(name)[:80] for name in weight_map.values() if not _is_file_name(name)})
    if outside:
        raise UnsupportedError("names files that are no *.bin of its folder", path=str(path), problems=outside[:20])
    return weight_map


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".bin") and "/" not in name and not name.startswith(".")
