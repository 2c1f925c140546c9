"""The allow list: every global that a pickle may name, by exact name, and what the pickle may do with it.

Training loads a checkpoint with `weights_only=False`: it imports what the pickles name, calls it, and sets the state
that they give. So every entry is harmless with any arguments that its `Use` permits. A name whose call runs code, opens
files or allocates memory by a number is not in the list, even if a library writes it. Sources: the names that DeepSpeed
0.19.8, torch 2.13 (with `torch._weights_only_unpickler`), Megatron-Core 0.16.1 (with `megatron.core.safe_globals`),
numpy 2.4 and Python 3.11 pickle; entries of other versions are marked in tests/engine/pickled_examples.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from reshard.formats.pt.objects import ITEM_BYTES, STORAGE_DTYPES, Global, Inert

_SCALARS = (str, int, float, bytes, type(None))


def _never(_value: Any) -> bool:
    return False


def _always(_value: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Operations that a pickle may apply to a name, in addition to holding it as a value.

    Attributes:
        reduce: arguments that it may be called with (REDUCE).
        new: arguments that its class may be instantiated with, without its constructor (NEWOBJ).
        state: states that such an object may be given (BUILD).
        items: it is a list to append to.
        pairs: it is a dict to fill.
    """

    reduce: Callable[[tuple[Any, ...]], bool] = _never
    new: Callable[[tuple[Any, ...]], bool] = _never
    state: Callable[[Any], bool] = _never
    items: bool = False
    pairs: bool = False

    def permits(self, made: Inert) -> bool:
        """Return True if the recipe `made` does only what this use permits."""
        call = self.reduce if made.kind == "reduce" else self.new
        return (
            call(made.args)
            and (made.state is None or self.state(made.state))
            and (self.items or not made.items)
            and (self.pairs or not made.pairs)
        )


# --- arguments and states -------------------------------------------------------------------------------------------


def _has_no_args(args: tuple[Any, ...]) -> bool:
    return not args


def _is_one_scalar(args: tuple[Any, ...]) -> bool:
    """Return True for one scalar: the value of an enumeration's member. More arguments would create a new class."""
    return len(args) == 1 and isinstance(args[0], _SCALARS)


def _are_strings(args: tuple[Any, ...]) -> bool:
    return all(isinstance(item, str) for item in args)


def _is_one_string(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and _are_strings(args)


def _are_numbers(args: tuple[Any, ...]) -> bool:
    return 0 < len(args) <= 3 and all(item is None or isinstance(item, int | float) for item in args)


def _is_list_or_empty(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and isinstance(args[0], list | tuple))


def _is_latin1(args: tuple[Any, ...]) -> bool:
    """Return True for bytes as protocol 2 writes them. Python would import any other codec by its name."""
    return len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1")


def _is_bytes(value: Any) -> bool:
    """Return True for bytes, or for the call with which protocol 2 writes them."""
    return isinstance(value, bytes) or (isinstance(value, Inert) and value.target in _BYTES)


def _is_content(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and _is_bytes(args[0])) or _is_latin1(args)


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Return True for scalars and objects of `datetime`; each of these objects is checked by itself."""
    return all(isinstance(item, _SCALARS) or (isinstance(item, Inert) and item.target in _TIMES) for item in args)


def _is_factory(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and (args[0] is None or args[0] in _TYPES))


def _are_counts(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and isinstance(args[0], dict))


def _is_bounded_list(args: tuple[Any, ...]) -> bool:
    return (
        _is_list_or_empty(args[:1])
        and len(args) <= 2
        and (len(args) < 2 or args[1] is None or isinstance(args[1], int))
    )


def _is_device(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], str) and (len(args) == 1 or (len(args) == 2 and isinstance(args[1], int)))


def _is_subclass(args: tuple[Any, ...]) -> bool:
    """Return True for a tensor with attributes or of a subclass: (rebuild function, class, arguments, attributes)."""
    if len(args) != 4 or args[0] not in _REBUILDS or not isinstance(args[1], Global) or not isinstance(args[2], tuple):
        return False
    return args[3] is None or _are_attributes(args[3])


def _is_attribute_dict(state: Any) -> bool:
    return isinstance(state, dict) and all(isinstance(key, str) and not key.startswith("__") for key in state)


def _are_attributes(state: Any) -> bool:
    """Return True for attributes of an object, a dict or (dict, slots), without names that Python itself uses."""
    if isinstance(state, dict):
        return _is_attribute_dict(state)
    return (
        isinstance(state, tuple) and len(state) == 2 and all(part is None or _is_attribute_dict(part) for part in state)
    )


def _are_properties(state: Any) -> bool:
    """Return True for the state of `TensorProperties`: (dtype, layout, requires_grad, memory format, pin_memory)."""
    return isinstance(state, tuple)


def _is_buffer_state(state: Any) -> bool:
    """Return True for the state of an `io.BytesIO`: (content, position, attributes)."""
    return (
        isinstance(state, tuple)
        and len(state) == 3
        and _is_bytes(state[0])
        and isinstance(state[1], int)
        and (state[2] is None or _is_attribute_dict(state[2]))
    )


# --- numpy: a dtype or array that contradicts itself would let numpy read memory outside of the array -----------------

_DTYPE = re.compile(r"[biufcSUVMm][0-9]{1,9}|O8")
_FLAGS = {"O": 63, "U": 8}


def _are_dtype_args(args: tuple[Any, ...]) -> bool:
    if len(args) not in (1, 3) or not isinstance(args[0], str) or _DTYPE.fullmatch(args[0]) is None:
        return False
    return all(isinstance(flag, int) for flag in args[1:])


def _is_plain_dtype(made: Inert) -> bool:
    """Return True for a plain dtype without fields, whose state agrees with its name."""
    code, state = made.args[0][0], made.state
    if made.kind != "reduce" or made.items or made.pairs:
        return False
    if state is None:
        return True
    if not isinstance(state, tuple) or len(state) not in (8, 9) or state[2:5] != (None, None, None):
        return False
    size = int(made.args[0][1:])
    sizes = {"S": (size, 1), "V": (size, 1), "U": (4 * size, 4)}.get(code, (-1, -1))
    if state[0] not in (3, 4) or state[1] not in ("<", ">", "|", "="):
        return False
    return state[5:7] == sizes and state[7] == _FLAGS.get(code, 0) and (len(state) == 8 or code in "Mm")


def _is_dtype(value: Any, *, objects: bool) -> bool:
    return (
        isinstance(value, Inert)
        and value.target == _NUMPY_DTYPE
        and bool(value.args)
        and (value.args[0] == "O8") is objects
    )


def _is_empty_array(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and args[0] == _NUMPY_ARRAY and args[1] == (0,) and _is_bytes(args[2])


def _is_array_state(state: Any) -> bool:
    """Return True for the state of an array: (version, shape, dtype, is in Fortran order, elements)."""
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1 or not _is_shape(state[1]):
        return False
    if isinstance(state[4], list):
        return _is_dtype(state[2], objects=True) and len(state[4]) == math.prod(state[1])
    return _is_dtype(state[2], objects=False) and _is_bytes(state[4])


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 1 << 48 for size in value)


def _is_numpy_scalar(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and _is_dtype(args[0], objects=False) and _is_bytes(args[1])


def _is_buffer_array(args: tuple[Any, ...]) -> bool:
    return (
        len(args) == 4
        and _is_bytes(args[0])
        and _is_dtype(args[1], objects=False)
        and _is_shape(args[2])
        and args[3] in ("C", "F")
    )


def _is_bit_generator(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and (args[0] in _BIT_GENERATORS or isinstance(args[0], str))


def _has_bit_generator(args: tuple[Any, ...]) -> bool:
    """Return True for the arguments of a generator: a bit generator, or the name of one."""
    made = bool(args) and isinstance(args[0], Inert) and args[0].target == _BIT_GENERATOR
    return (made or (bool(args) and isinstance(args[0], str))) and args[1:] in ((), (_BIT_GENERATOR,))


def _are_seeds(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and args[0] == _SEEDS and isinstance(args[1], int) and args[2] is None


# --- the list -------------------------------------------------------------------------------------------------------

_ENCODE = Global("_codecs", "encode")
_BYTES = (_ENCODE, Global("builtins", "bytes"), Global("__builtin__", "bytes"))
_NUMPY_DTYPE, _NUMPY_ARRAY = Global("numpy", "dtype"), Global("numpy", "ndarray")
_BIT_GENERATOR = Global("numpy.random._pickle", "__bit_generator_ctor")
_SEEDS = Global("numpy.random.bit_generator", "SeedSequence")

_NAME = Use()
_ENUM = Use(reduce=_is_one_scalar)
_OBJECT = Use(new=_has_no_args, state=_are_attributes)
_PATH = Use(reduce=_are_strings)
_SET = Use(reduce=_is_list_or_empty)


def _split_names(module: str, names: str) -> tuple[Global, ...]:
    return tuple(Global(module, name) for name in names.split())


_TYPES = (
    *_split_names("builtins", "bool bytes dict float int list str tuple set frozenset"),
    *_split_names("__builtin__", "bool bytes dict float int long list str unicode tuple set frozenset"),
)
_TIMES = (_ENCODE, *_split_names("datetime", "date datetime time timedelta timezone"))
_REBUILDS = _split_names(
    "torch._utils",
    "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state"
    " _rebuild_sparse_tensor _rebuild_qtensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor"
    " _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor",
)
"""Functions with which torch rebuilds tensors. The reader supports three of them and refuses other kinds of tensors."""

_BIT_GENERATORS = (
    *_split_names("numpy.random._mt19937", "MT19937"),
    *_split_names("numpy.random._pcg64", "PCG64 PCG64DXSM"),
    *_split_names("numpy.random._philox", "Philox"),
    *_split_names("numpy.random._sfc64", "SFC64"),
)
_DTYPES = " ".join(
    [*ITEM_BYTES, "complex32 quint8 qint8 qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
)


def _list_python() -> Mapping[Global, Use]:
    uses = dict.fromkeys(_TYPES, _NAME)
    for module in ("builtins", "__builtin__"):  # as protocols 3 and later call it, and as protocol 2 does
        uses |= dict.fromkeys(_split_names(module, "set frozenset"), _SET)
        uses |= dict.fromkeys(_split_names(module, "Ellipsis"), _NAME)
        uses |= dict.fromkeys(_split_names(module, "bytearray"), Use(reduce=_is_content))
        uses |= dict.fromkeys(_split_names(module, "bytes"), Use(reduce=_has_no_args))
        uses |= dict.fromkeys(_split_names(module, "complex slice"), Use(reduce=_are_numbers))
        uses |= dict.fromkeys(
            _split_names(module, "range" if module == "builtins" else "xrange"), Use(reduce=_are_numbers)
        )
        uses |= dict.fromkeys(_split_names(module, "object"), Use(new=_has_no_args))
    uses[_ENCODE] = Use(reduce=_is_latin1)
    uses[Global("_io", "BytesIO")] = Use(new=_has_no_args, state=_is_buffer_state)
    uses[Global("argparse", "Namespace")] = _OBJECT
    uses[Global("collections", "Counter")] = Use(reduce=_are_counts)
    uses[Global("collections", "OrderedDict")] = Use(reduce=_is_list_or_empty, state=_are_attributes, pairs=True)
    uses[Global("collections", "defaultdict")] = Use(reduce=_is_factory, pairs=True)
    uses[Global("collections", "deque")] = Use(reduce=_is_bounded_list, items=True)
    uses |= dict.fromkeys(_TIMES[1:], Use(reduce=_are_plain))
    for module in ("pathlib", "pathlib._local"):
        uses |= dict.fromkeys(_split_names(module, "PosixPath PurePosixPath"), _PATH)
    uses[Global("signal", "Signals")] = _ENUM
    uses[Global("types", "SimpleNamespace")] = Use(reduce=_has_no_args, state=_are_attributes)
    uses[Global("uuid", "UUID")] = _OBJECT
    uses[Global("uuid", "SafeUUID")] = _ENUM
    return uses


def _list_numpy() -> Mapping[Global, Use]:
    uses = {}
    for core in ("numpy.core", "numpy._core"):  # numpy 1, and numpy 2
        uses[Global(f"{core}.multiarray", "_reconstruct")] = Use(reduce=_is_empty_array, state=_is_array_state)
        uses[Global(f"{core}.multiarray", "scalar")] = Use(reduce=_is_numpy_scalar)
        uses[Global(f"{core}.numeric", "_frombuffer")] = Use(reduce=_is_buffer_array)
    uses[_NUMPY_DTYPE] = Use(reduce=_are_dtype_args, state=_always)
    scalars = "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    uses |= dict.fromkeys(
        _split_names("numpy", f"ndarray bool {scalars} str_ bytes_ object_ void datetime64 timedelta64"), _NAME
    )
    kinds = "Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float16 Float32 Float64 Complex64 Complex128"
    uses |= dict.fromkeys(
        _split_names("numpy.dtypes", " ".join(f"{kind}DType" for kind in f"{kinds} Bytes Str Object Void".split())),
        _NAME,
    )
    uses |= dict.fromkeys((*_BIT_GENERATORS, _SEEDS), _NAME)
    uses[_BIT_GENERATOR] = Use(reduce=_is_bit_generator, state=_always)
    uses |= dict.fromkeys(
        _split_names("numpy.random._pickle", "__generator_ctor __randomstate_ctor"),
        Use(reduce=_has_bit_generator, state=_always),
    )
    uses[Global("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence")] = Use(reduce=_are_seeds, state=_always)
    return uses


def _list_torch() -> Mapping[Global, Use]:
    uses = dict.fromkeys(_split_names("torch", _DTYPES), _NAME)
    quantized = "QUInt8Storage QInt8Storage QInt32Storage QUInt4x2Storage QUInt2x4Storage"
    uses |= dict.fromkeys(
        _split_names("torch", f"{' '.join(STORAGE_DTYPES)} {quantized} UntypedStorage Tensor strided"), _NAME
    )
    schemes = "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric"
    uses |= dict.fromkeys(_split_names("torch", f"{schemes} per_channel_affine_float_qparams"), _NAME)
    uses |= dict.fromkeys(_split_names("torch.storage", "UntypedStorage TypedStorage"), _NAME)
    uses |= dict.fromkeys(_split_names("torch.nn.parameter", "Parameter Buffer"), _NAME)
    uses |= dict.fromkeys(_REBUILDS, _NAME)
    uses[Global("torch._tensor", "_rebuild_from_type_v2")] = Use(reduce=_is_subclass)
    uses[Global("torch", "Size")] = _NAME  # the machine makes tuples of sizes
    uses[Global("torch", "device")] = Use(reduce=_is_device)
    uses[Global("torch.serialization", "_get_layout")] = Use(reduce=_is_one_string)
    uses[Global("torch.torch_version", "TorchVersion")] = Use(new=_is_one_string)
    return uses


def _list_torch_distributed() -> Mapping[Global, Use]:
    uses: dict[Global, Use] = {}
    dcp, shard = "torch.distributed.checkpoint", "torch.distributed._shard"
    metadata = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta"
    uses |= dict.fromkeys(_split_names(f"{dcp}.metadata", metadata), _OBJECT)
    uses |= dict.fromkeys(_split_names(f"{dcp}.filesystem", "_StorageInfo _StoragePrefix"), _OBJECT)
    uses |= dict.fromkeys(
        _split_names(f"{dcp}.planner", "SavePlan WriteItem TensorWriteData BytesIOWriteData"), _OBJECT
    )
    uses[Global(f"{dcp}.planner", "WriteItemType")] = _ENUM
    properties = Use(new=_has_no_args, state=lambda state: _are_properties(state) or _are_attributes(state))
    for module, encoding in ((f"{dcp}.metadata", "_MEM_FORMAT"), (f"{shard}.sharded_tensor.metadata", "MEM_FORMAT")):
        uses[Global(module, "TensorProperties")] = properties
        uses[Global(module, f"{encoding}_ENCODING")] = _ENUM
    uses |= dict.fromkeys(_split_names(f"{shard}.sharded_tensor.metadata", "ShardedTensorMetadata"), _OBJECT)
    uses |= dict.fromkeys(_split_names(f"{shard}.metadata", "ShardMetadata"), _OBJECT)
    uses |= dict.fromkeys(_split_names(f"{shard}.sharding_spec.api", "EnumerableShardingSpec"), _OBJECT)
    uses |= dict.fromkeys(_split_names(f"{shard}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"), _OBJECT)
    uses |= dict.fromkeys(_split_names("torch.distributed.remote_device", "_remote_device"), _OBJECT)
    placements = "Shard Replicate Partial _StridedShard"
    for module in ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types"):
        uses |= dict.fromkeys(_split_names(module, placements), _OBJECT)
    return uses


def _list_deepspeed() -> Mapping[Global, Use]:
    uses = dict.fromkeys(_split_names("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler"), _OBJECT)
    uses |= dict.fromkeys(_split_names("deepspeed.runtime.fp16.loss_scaler", "LossScaleProfile"), _ENUM)
    uses |= dict.fromkeys(_split_names("deepspeed.runtime.zero.config", "ZeroStageEnum"), _ENUM)
    uses |= dict.fromkeys(_split_names("deepspeed.utils.tensor_fragment", "fragment_address"), _OBJECT)
    uses |= dict.fromkeys(_split_names("deepspeed.runtime.bf16_optimizer", "fragment_address"), _OBJECT)  # before 0.7.1
    uses |= dict.fromkeys(_split_names("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), _OBJECT)
    return uses


def _list_megatron() -> Mapping[Global, Use]:
    core = "megatron.core"
    uses = dict.fromkeys(_split_names(f"{core}.enums", "ModelType Fp8Recipe Fp4Recipe"), _ENUM)
    kinds = "LayerType AttnType AttnMaskType"
    uses |= dict.fromkeys(
        _split_names(f"{core}.transformer.enums", f"ModelType {kinds} AttnBackend CudaGraphScope"), _ENUM
    )
    reruns = "RerunMode RerunState RerunDiagnostic RerunValidationStatus"
    uses |= dict.fromkeys(_split_names(f"{core}.rerun_state_machine", reruns), _ENUM)
    uses |= dict.fromkeys(_split_names(f"{core}.optimizer.optimizer_config", "OptimizerConfig"), _OBJECT)
    uses |= dict.fromkeys(
        _split_names(f"{core}.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"), _OBJECT
    )
    for module in ("megatron.model.enums", "megatron.legacy.model.enums", "megatron.enums"):  # Megatron-LM, -DeepSpeed
        uses |= dict.fromkeys(_split_names(module, f"ModelType {kinds} PositionEmbeddingType"), _ENUM)
    return uses


KNOWN: Mapping[Global, Use] = {
    **_list_python(),
    **_list_numpy(),
    **_list_torch(),
    **_list_torch_distributed(),
    **_list_deepspeed(),
    **_list_megatron(),
}
"""The allow list."""


def is_permitted(made: Inert) -> bool:
    """Return True if an object, whose name must be in the list, is made as the libraries make it."""
    if not KNOWN[made.target].permits(made):
        return False
    return made.target != _NUMPY_DTYPE or _is_plain_dtype(made)
