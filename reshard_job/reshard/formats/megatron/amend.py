"""Write the common part of the target: that of a folder, with other progress, or without an optimizer.

Source: megatron/training/checkpointing.py (`generate_state_dict`, `load_checkpoint`: which keys there are, and what
`args.no_save_optim` means), megatron/core/optimizer/distrib_optimizer.py and optimizer.py of 0.16.1 (`step` of each
parameter group, `common_step`).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.dcp.items import MAX_OBJECT_BYTES, Items
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.megatron.common import COMMON_FILE
from reshard.formats.pt.emit import emit
from reshard.formats.pt.objects import Inert, Tensor, new_tensor
from reshard.formats.pt.reader import read, read_tensor_bytes
from reshard.formats.pt.writer import lay_out_pt
from reshard.tensors.layout import TargetFile

RESHARDABLE = "fully_reshardable"
_WITHOUT_PREFIX = "chained_optim_avoid_prefix"
"""Keys of states have no prefix that names the optimizer, if the run has several."""
_OF_OPTIMIZER = ("optimizer", "opt_param_scheduler")
_CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Values to write in place of those of the folder; None keeps a value.

    Attributes:
        step: iterations done.
        samples: global samples consumed.
        optimizer_step: steps that the optimizer counts.
        optimizer: keep the optimizer's settings and learning-rate schedule.
    """

    step: int | None = None
    samples: int | None = None
    optimizer_step: int | None = None
    optimizer: bool = True


def build_common_file(folder: Path, progress: Progress, settings: Mapping[Any, Any] | None = None) -> TargetFile:
    """Build `common.pt` from that of `folder`; it is written anew because no checksum protects its archive.

    Args:
        folder: the folder whose common part it is.
        progress: values that differ from it.
        settings: fields of the optimizer that the folder has elsewhere, see `MegatronExtra.settings`.

    Raises:
        UnsupportedError: the file is too large, or has no field for the optimizer's steps.
        CorruptSourceError, UnsafePickleError: the file is damaged.
    """
    path = folder / COMMON_FILE
    file = read(path)
    if file.num_bytes > MAX_OBJECT_BYTES:
        raise UnsupportedError(
            f"has {file.num_bytes} bytes, at most {MAX_OBJECT_BYTES} are carried along", path=str(path)
        )
    for storage in file.storages.values():
        whole = Tensor(storage=storage, offset=0, shape=(storage.num_elements,), stride=(1,))
        storage.data = read_tensor_bytes(path, whole, limit_bytes=MAX_OBJECT_BYTES)
    if settings is not None and isinstance(file.value, dict):
        _make_reshardable(file.value, settings)
    amend(file.value, progress, str(path))
    layout = lay_out_pt(COMMON_FILE.removesuffix(".pt"), file.value)
    return TargetFile(path=COMMON_FILE, num_bytes=layout.num_bytes, fixed=layout.fixed)


def _make_reshardable(fields: dict[Any, Any], settings: Mapping[Any, Any]) -> None:
    """Say that the optimizer's states are laid out like weights, and put its settings into the common part."""
    kind = {"param_state_sharding_type": RESHARDABLE}
    is_chain = all(isinstance(key, int) for key in settings)
    fields["optimizer"] = {at: {**own, **kind} for at, own in settings.items()} if is_chain else {**settings, **kind}
    content = fields.get("content_metadata")
    if isinstance(content, dict):
        content["distrib_optim_sharding_type"] = RESHARDABLE
        content[_WITHOUT_PREFIX] = True


def add_common_object(folder: Path, entry: Entry, files: RankFiles, progress: Progress) -> Entry:
    """Add the common part to rank 0's file, if it is an object among the entries.

    Raises:
        UnsupportedError: the object has no field for the optimizer's steps, or it holds tensors and has to change.
        CorruptSourceError, UnsafePickleError: the object is damaged.
    """
    place = entry.chunks[0][1]
    with Items(folder) as items:
        value = items.read_whole(entry.key, place)
    if not amend(value, progress, str(folder)):
        return dataclasses.replace(entry, chunks=((None, files.add_copy(0, value)),))
    if emit(value)[1]:
        raise UnsupportedError(
            f"{entry.key} holds tensors, and would have to say another step",
            path=str(folder),
            hint="name with --like a checkpoint of the source's step",
        )
    return dataclasses.replace(entry, chunks=((None, files.add_copy(0, value)),))


def amend(value: Any, progress: Progress, where: str) -> bool:
    """Change the object in place; return whether anything changed.

    Raises:
        UnsupportedError: the object is not a dict, or has no field for the optimizer's steps.
    """
    fields = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(fields, dict):
        raise UnsupportedError(f"is a {type(fields).__name__}, expected a dict", path=where)
    args = fields.get("args")
    arguments = args.state if isinstance(args, Inert) and isinstance(args.state, dict) else None
    changed = [_set(fields, "iteration", progress.step)]
    if arguments is not None:
        changed.append(_set(arguments, "consumed_train_samples", progress.samples))
    if not progress.optimizer:
        changed += [fields.pop(key, None) is not None for key in _OF_OPTIMIZER]
        changed.append(arguments is not None and _set(arguments, "no_save_optim", True))
    elif progress.optimizer_step is not None:
        step_changes = list(_set_steps(fields.get("optimizer"), progress.optimizer_step))
        if not step_changes:
            raise UnsupportedError(
                "its optimizer's settings have no step",
                path=where,
                hint="name with --like a checkpoint that was saved after at least one step, with its optimizer",
            )
        changed += step_changes
    return any(changed)


def _set(fields: dict[Any, Any], key: str, value: float | None) -> bool:
    if value is None or (key in fields and fields[key] == value):
        return False
    fields[key] = value
    return True


def _set_steps(value: Any, step: int) -> list[bool]:
    """Set every `step` of a parameter group and every `common_step` of all optimizers; return which ones changed."""
    if not isinstance(value, dict):
        return []
    groups, state = value.get("param_groups"), value.get("state")
    changes = [
        _set_step(group, "step", step)
        for group in (groups if isinstance(groups, list) else [])
        if isinstance(group, dict) and "step" in group
    ]
    if isinstance(state, dict) and "common_step" in state:
        changes.append(_set_step(state, "common_step", step))
    return [*changes, *(each for item in value.values() for each in _set_steps(item, step))]


def _set_step(fields: dict[Any, Any], key: str, step: int) -> bool:
    old = fields[key]
    if not isinstance(old, Tensor):
        return _set(fields, key, float(step) if isinstance(old, float) else step)
    if old.dtype not in _CODES or old.num_elements != 1:
        raise UnsupportedError(f"{key} is a tensor {old.dtype} {list(old.shape)}, expected one number")
    data = struct.pack(_CODES[old.dtype], step)
    fields[key] = new_tensor(old.dtype, old.shape, data)
    return old.storage.data != data
