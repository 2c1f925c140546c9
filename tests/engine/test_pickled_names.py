"""The allow list against the frameworks: each entry is what a real object pickles, and torch.load makes it again."""

import importlib
import io
import zipfile
from pathlib import Path

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.pt.known_globals import KNOWN
from reshard.formats.pt.objects import Global
from reshard.formats.pt.reader import read
from reshard.formats.pt.trust import trusting
from reshard.formats.pt.writer import lay_out_pt
from tests.unit.reshard.formats.test_pt_known_globals import names_in

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

OTHER_VERSIONS = {
    **dict.fromkeys(
        [
            f"{module}.{name}"
            for module in ("megatron.model.enums", "megatron.legacy.model.enums", "megatron.enums")
            for name in ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType")
        ],
        "Megatron-LM and Megatron-DeepSpeed, which are no packages",
    ),
    "deepspeed.runtime.bf16_optimizer.fragment_address": "DeepSpeed 0.7.0",
    "torch.distributed._tensor.placement_types.Shard": "torch 2.4 and before",
    "torch.distributed._tensor.placement_types.Replicate": "torch 2.4 and before",
    "torch.distributed._tensor.placement_types.Partial": "torch 2.4 and before",
    "torch.distributed._tensor.placement_types._StridedShard": "torch 2.4 and before",
    "torch.strided": "torch before it pickled layouts by a function",
    "torch.UntypedStorage": "torch before it moved to torch.storage",
    "torch._utils._rebuild_tensor": "torch 0.3 and before",
    "torch._utils._rebuild_device_tensor_from_numpy": "torch 2.5 and before, of tensors on XLA",
}
"""Entries that the installed versions do not write; test_pt_known_globals.py reads and writes them."""


def made(name: str):
    """An object whose pickle holds the name."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import metadata as sharded
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
    from torch.distributed.checkpoint import filesystem, metadata, planner
    from torch.distributed.tensor import placement_types as placements

    attribute = name.rpartition(".")[2]
    shard = ShardMetadata([0, 0], [2, 2], "rank:0/cpu")
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    properties = metadata.TensorProperties.create_from_tensor(torch.ones(2))
    index = metadata.MetadataIndex("a", [0], 1)
    storage = metadata.TensorStorageMetadata(properties, torch.Size([2]), [chunk])
    item = planner.WriteItem(index, planner.WriteItemType.SHARD, None, planner.TensorWriteData(chunk, properties, (2,)))
    old = sharded.TensorProperties(torch.float32, torch.strided, False, torch.contiguous_format, False)
    attributed = torch.ones(2)
    attributed.mine = [1]
    with_state = torch.nn.Parameter(torch.ones(2))
    with_state.mine = 1
    by_hand = {
        "torch._utils._rebuild_tensor_v2": lambda: torch.ones(2),
        "torch._utils._rebuild_tensor_v3": lambda: torch.ones(2).to(torch.float8_e4m3fn),
        "torch._utils._rebuild_parameter": lambda: torch.nn.Parameter(torch.ones(2)),
        "torch._utils._rebuild_parameter_with_state": lambda: with_state,
        "torch._utils._rebuild_sparse_tensor": lambda: torch.ones(2).to_sparse(),
        "torch._utils._rebuild_qtensor": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        "torch._utils._rebuild_meta_tensor_no_storage": lambda: torch.ones(2, device="meta"),
        "torch._utils._rebuild_nested_tensor": lambda: torch.nested.nested_tensor([torch.ones(2)]),
        "torch._tensor._rebuild_from_type_v2": lambda: attributed,
        "torch.Size": lambda: torch.Size([2, 3]),
        "torch.device": lambda: [torch.device("cpu"), torch.device("cuda", 1)],
        "torch.serialization._get_layout": lambda: torch.strided,
        "torch.torch_version.TorchVersion": lambda: torch.__version__,
        "torch.distributed.checkpoint.metadata.Metadata": lambda: metadata.Metadata({"a": storage}),
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata": lambda: storage,
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata": metadata.BytesStorageMetadata,
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata": lambda: chunk,
        "torch.distributed.checkpoint.metadata.MetadataIndex": lambda: index,
        "torch.distributed.checkpoint.metadata.StorageMeta": lambda: metadata.StorageMeta(Path("/a"), "b", None, ["c"]),
        "torch.distributed.checkpoint.metadata.TensorProperties": lambda: properties,
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": lambda: properties,
        "torch.distributed.checkpoint.filesystem._StorageInfo": lambda: filesystem._StorageInfo("a", 1, 2),
        "torch.distributed.checkpoint.filesystem._StoragePrefix": lambda: filesystem._StoragePrefix("a"),
        "torch.distributed.checkpoint.planner.SavePlan": lambda: planner.SavePlan([item]),
        "torch.distributed.checkpoint.planner.WriteItem": lambda: item,
        "torch.distributed.checkpoint.planner.TensorWriteData": lambda: item,
        "torch.distributed.checkpoint.planner.BytesIOWriteData": lambda: planner.BytesIOWriteData(3),
        "torch.distributed._shard.metadata.ShardMetadata": lambda: shard,
        "torch.distributed.remote_device._remote_device": lambda: shard,
        "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec": lambda: EnumerableShardingSpec([shard]),
        "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec": lambda: ChunkShardingSpec(
            0, ["rank:0/cpu"]
        ),
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": lambda: old,
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": lambda: old,
        "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata": lambda: sharded.ShardedTensorMetadata(
            [shard], torch.Size([2, 2]), old
        ),
        "torch.distributed.tensor.placement_types.Shard": lambda: placements.Shard(1),
        "torch.distributed.tensor.placement_types.Replicate": placements.Replicate,
        "torch.distributed.tensor.placement_types.Partial": lambda: placements.Partial("avg"),
        "torch.distributed.tensor.placement_types._StridedShard": lambda: placements._StridedShard(0, split_factor=2),
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": lambda: scaler(dynamic=True),
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": lambda: scaler(dynamic=False),
        "deepspeed.utils.tensor_fragment.fragment_address": lambda: imported(name)(3, 4),
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape": lambda: imported(name)(["a.*"], (2, (1, 3)), 0),
        "megatron.core.optimizer.optimizer_config.OptimizerConfig": lambda: imported(name)(lr=0.1, bf16=True),
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": lambda: filled(name),
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": lambda: filled(name),
    }
    if name in by_hand:
        return by_hand[name]()
    if name.endswith("Storage") and attribute in ("UntypedStorage", "TypedStorage"):
        return imported(name)
    value = imported(name)
    is_enum = isinstance(value, type) and hasattr(value, "__members__")
    return next(iter(value)) if is_enum else value


def imported(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def filled(name: str):
    value = imported(name)()
    value.mine = [1, 2]
    return value


def scaler(*, dynamic: bool):
    from deepspeed.runtime.fp16 import loss_scaler

    if dynamic:
        return loss_scaler.DynamicLossScaler(2.0**16, 1000, 1.0, 2, False, dtype=torch.half)
    return loss_scaler.LossScaler(torch.half)


def through_the_resharder(path: Path) -> Path:
    """The same file as the resharder writes it."""
    file, original = read(path), path.read_bytes()
    for storage in file.storages.values():
        storage.data = original[storage.file_offset : storage.file_offset + storage.num_bytes]
    layout = lay_out_pt("b", file.value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    path.with_name("b.pt").write_bytes(content)
    return path.with_name("b.pt")


def told(value) -> str:
    """Describe an object by its types, attributes and elements, for comparisons."""
    if isinstance(value, torch.Tensor):
        return f"{type(value)} {value.dtype} {value.float().tolist()} {value.requires_grad} {value.__dict__}"
    if isinstance(value, list | tuple):
        return f"{type(value)} {[told(item) for item in value]}"
    if isinstance(value, dict):
        return f"{type(value)} { {key: told(item) for key, item in value.items()} }"
    own = getattr(value, "__dict__", None)
    is_plain = own is None or isinstance(value, type | str) or hasattr(type(value), "__members__")
    return f"{type(value)} {value!r}" if is_plain else f"{type(value)} {told(dict(own))} {value_of_slots(value)}"


def value_of_slots(value) -> list[str]:
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ()) if hasattr(value, slot)]
    return [f"{slot} {told(getattr(value, slot))}" for slot in slots if not slot.startswith("__")]


NAMES = sorted(
    str(name)
    for name in KNOWN
    if name.module.partition(".")[0] in ("torch", "deepspeed", "megatron") and str(name) not in OTHER_VERSIONS
)
REFUSED_AS_TENSORS = (
    "_rebuild_parameter_with_state", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage",
    "_rebuild_nested_tensor",
)  # fmt: skip
NEEDS_MORE = {
    "torch._utils._rebuild_wrapper_subclass": "DTensor, whose own classes are not in the list",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "needs another device than this machine has",
}


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(NEEDS_MORE)))
def test_an_entry_is_what_a_real_object_pickles_and_torch_makes_it_again(name, tmp_path):
    if name.startswith(("deepspeed", "megatron")):
        pytest.importorskip(name.partition(".")[0])
    value = made(name)
    path = tmp_path / "a.pt"
    torch.save({"a": value}, path)
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        pickled = archive.read("a/data.pkl")
    assert name in names_in(pickled)
    if name.endswith(REFUSED_AS_TENSORS):
        with pytest.raises(UnsupportedError, match=r"tensor kind|storage class"):
            read(path)
        return
    copied = through_the_resharder(path)
    assert told(torch.load(path, weights_only=False)) == told(torch.load(copied, weights_only=False))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(OTHER_VERSIONS)))
def test_an_entry_exists_in_the_installed_version(name):
    if name.startswith(("deepspeed", "megatron")):
        pytest.importorskip(name.partition(".")[0])
    assert imported(name) is not None


def test_what_torch_accepts_with_weights_only_is_in_the_list_but_for_types_of_devices():
    from torch._weights_only_unpickler import _get_allowed_globals

    known = {str(name) for name in KNOWN}
    missing = {name for name in _get_allowed_globals() if name not in known}
    assert {name for name in missing if not name.endswith(("Tensor", "Storage"))} == set()
    assert not {name for name in missing if name.startswith("torch.") and name.count(".") == 1} & known


def test_what_megatron_declares_safe_is_in_the_list():
    safe = pytest.importorskip("megatron.core.safe_globals").SAFE_GLOBALS
    names = {Global(item.__module__, item.__qualname__) for item in safe}
    assert names <= set(KNOWN)


def test_a_trusted_class_is_made_again(tmp_path):
    torch.save({"a": Own(3)}, tmp_path / "a.pt")
    with trusting([f"{Own.__module__}.Own"]):
        copied = through_the_resharder(tmp_path / "a.pt")
    assert torch.load(copied, weights_only=False)["a"].value == 3


class Own:
    def __init__(self, value):
        self.value = value
