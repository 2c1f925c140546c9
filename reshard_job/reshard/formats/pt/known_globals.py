"""The allow list: every global that a pickle may name, by exact name, and what the pickle may do with it.

A checkpoint is loaded by the training with `weights_only=False`: what its pickles name is imported, called and filled
with whatever they say. So an entry is harmless with any arguments that its `Use` lets pass, and a name whose call runs
code, opens files or makes memory out of a number is not here, whoever writes it. Sources: what DeepSpeed 0.19.8, torch
2.13 (with `torch._weights_only_unpickler`), Megatron-Core 0.16.1 (with `megatron.core.safe_globals`), numpy 2.4 and
Python 3.11 pickle; entries of other versions are marked in tests/engine/pickled_examples.py.
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
    """What a pickle may do with a name, besides to hold it as a value.

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
        """True if this is how the object is made that `made` is the recipe of."""
        call = self.reduce if made.kind == "reduce" else self.new
        return (
            call(made.args)
            and (made.state is None or self.state(made.state))
            and (self.items or not made.items)
            and (self.pairs or not made.pairs)
        )


# --- arguments and states -------------------------------------------------------------------------------------------


def _none(args: tuple[Any, ...]) -> bool:
    return not args


def _one_scalar(args: tuple[Any, ...]) -> bool:
    """A member of an enumeration by its value: with more arguments the call would make a new class."""
    return len(args) == 1 and isinstance(args[0], _SCALARS)


def _strings(args: tuple[Any, ...]) -> bool:
    return all(isinstance(item, str) for item in args)


def _one_string(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and _strings(args)


def _numbers(args: tuple[Any, ...]) -> bool:
    return 0 < len(args) <= 3 and all(item is None or isinstance(item, int | float) for item in args)


def _one_list(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and isinstance(args[0], list | tuple))


def _latin1(args: tuple[Any, ...]) -> bool:
    """How protocol 2 writes bytes. Another codec would be looked up by its name, and imported."""
    return len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1")


def _is_bytes(value: Any) -> bool:
    """Bytes, or how protocol 2 writes them."""
    return isinstance(value, bytes) or (isinstance(value, Inert) and value.target in _BYTES)


def _content(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and _is_bytes(args[0])) or _latin1(args)


def _plain(args: tuple[Any, ...]) -> bool:
    """Scalars, and objects of which each is judged itself."""
    return all(isinstance(item, _SCALARS) or (isinstance(item, Inert) and item.target in _TIMES) for item in args)


def _factory(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and (args[0] is None or args[0] in _TYPES))


def _counts(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and isinstance(args[0], dict))


def _bounded(args: tuple[Any, ...]) -> bool:
    return _one_list(args[:1]) and len(args) <= 2 and (len(args) < 2 or args[1] is None or isinstance(args[1], int))


def _device(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], str) and (len(args) == 1 or (len(args) == 2 and isinstance(args[1], int)))


def _subclass(args: tuple[Any, ...]) -> bool:
    """A tensor with attributes, or of a subclass: (how to rebuild it, class, arguments, attributes)."""
    if len(args) != 4 or args[0] not in _REBUILDS or not isinstance(args[1], Global) or not isinstance(args[2], tuple):
        return False
    return args[3] is None or _attributes(args[3])


def _named(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(key, str) and not key.startswith("__") for key in found)


def _attributes(state: Any) -> bool:
    """Attributes of an object, in its `__dict__`, or in that and in its slots; none that Python itself looks at."""
    if isinstance(state, dict):
        return _named(state)
    return isinstance(state, tuple) and len(state) == 2 and all(part is None or _named(part) for part in state)


def _properties(state: Any) -> bool:
    """dtype, layout, requires_grad, memory format, pin_memory of a tensor."""
    return isinstance(state, tuple)


def _buffer(state: Any) -> bool:
    """Content, position and attributes of an `io.BytesIO`."""
    return (
        isinstance(state, tuple)
        and len(state) == 3
        and _is_bytes(state[0])
        and isinstance(state[1], int)
        and (state[2] is None or _named(state[2]))
    )


# --- numpy: a type or an array that contradicts itself lets numpy read memory that is not its own ---------------------

_DTYPE = re.compile(r"[biufcSUVMm][0-9]{1,9}|O8")
_FLAGS = {"O": 63, "U": 8}


def _dtype_args(args: tuple[Any, ...]) -> bool:
    if len(args) not in (1, 3) or not isinstance(args[0], str) or _DTYPE.fullmatch(args[0]) is None:
        return False
    return all(isinstance(flag, int) for flag in args[1:])


def _dtype(made: Inert) -> bool:
    """A plain type of elements, whose state says the same as its name; no structure, no field."""
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


def _empty_array(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and args[0] == _NUMPY_ARRAY and args[1] == (0,) and _is_bytes(args[2])


def _array_state(state: Any) -> bool:
    """(version, shape, type, whether in Fortran's order, elements)."""
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1 or not _is_shape(state[1]):
        return False
    if isinstance(state[4], list):
        return _is_dtype(state[2], objects=True) and len(state[4]) == math.prod(state[1])
    return _is_dtype(state[2], objects=False) and _is_bytes(state[4])


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 1 << 48 for size in value)


def _scalar(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and _is_dtype(args[0], objects=False) and _is_bytes(args[1])


def _from_buffer(args: tuple[Any, ...]) -> bool:
    return (
        len(args) == 4
        and _is_bytes(args[0])
        and _is_dtype(args[1], objects=False)
        and _is_shape(args[2])
        and args[3] in ("C", "F")
    )


def _bit_generator(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and (args[0] in _BIT_GENERATORS or isinstance(args[0], str))


def _of_bit_generator(args: tuple[Any, ...]) -> bool:
    """A generator of its source of bits, or of the name of one."""
    made = bool(args) and isinstance(args[0], Inert) and args[0].target == _BIT_GENERATOR
    return (made or (bool(args) and isinstance(args[0], str))) and args[1:] in ((), (_BIT_GENERATOR,))


def _seeds(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and args[0] == _SEEDS and isinstance(args[1], int) and args[2] is None


# --- the list -------------------------------------------------------------------------------------------------------

_ENCODE = Global("_codecs", "encode")
_BYTES = (_ENCODE, Global("builtins", "bytes"), Global("__builtin__", "bytes"))
_NUMPY_DTYPE, _NUMPY_ARRAY = Global("numpy", "dtype"), Global("numpy", "ndarray")
_BIT_GENERATOR = Global("numpy.random._pickle", "__bit_generator_ctor")
_SEEDS = Global("numpy.random.bit_generator", "SeedSequence")

_NAME = Use()
_ENUM = Use(reduce=_one_scalar)
_OBJECT = Use(new=_none, state=_attributes)
_PATH = Use(reduce=_strings)
_SET = Use(reduce=_one_list)


def _each(module: str, names: str) -> tuple[Global, ...]:
    return tuple(Global(module, name) for name in names.split())


_TYPES = (
    *_each("builtins", "bool bytes dict float int list str tuple set frozenset"),
    *_each("__builtin__", "bool bytes dict float int long list str unicode tuple set frozenset"),
)
_TIMES = (_ENCODE, *_each("datetime", "date datetime time timedelta timezone"))
_REBUILDS = _each(
    "torch._utils",
    "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state"
    " _rebuild_sparse_tensor _rebuild_qtensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor"
    " _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor",
)
"""What torch rebuilds tensors with. The reader makes tensors of three and refuses the others as kinds of tensors."""

_BIT_GENERATORS = (
    *_each("numpy.random._mt19937", "MT19937"),
    *_each("numpy.random._pcg64", "PCG64 PCG64DXSM"),
    *_each("numpy.random._philox", "Philox"),
    *_each("numpy.random._sfc64", "SFC64"),
)
_DTYPES = " ".join(
    [*ITEM_BYTES, "complex32 quint8 qint8 qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
)


def _python() -> Mapping[Global, Use]:
    found = dict.fromkeys(_TYPES, _NAME)
    for module in ("builtins", "__builtin__"):  # as protocols 3 and later call it, and as protocol 2 does
        found |= dict.fromkeys(_each(module, "set frozenset"), _SET)
        found |= dict.fromkeys(_each(module, "Ellipsis"), _NAME)
        found |= dict.fromkeys(_each(module, "bytearray"), Use(reduce=_content))
        found |= dict.fromkeys(_each(module, "bytes"), Use(reduce=_none))
        found |= dict.fromkeys(_each(module, "complex slice"), Use(reduce=_numbers))
        found |= dict.fromkeys(_each(module, "range" if module == "builtins" else "xrange"), Use(reduce=_numbers))
        found |= dict.fromkeys(_each(module, "object"), Use(new=_none))
    found[_ENCODE] = Use(reduce=_latin1)
    found[Global("_io", "BytesIO")] = Use(new=_none, state=_buffer)
    found[Global("argparse", "Namespace")] = _OBJECT
    found[Global("collections", "Counter")] = Use(reduce=_counts)
    found[Global("collections", "OrderedDict")] = Use(reduce=_one_list, state=_attributes, pairs=True)
    found[Global("collections", "defaultdict")] = Use(reduce=_factory, pairs=True)
    found[Global("collections", "deque")] = Use(reduce=_bounded, items=True)
    found |= dict.fromkeys(_TIMES[1:], Use(reduce=_plain))
    for module in ("pathlib", "pathlib._local"):
        found |= dict.fromkeys(_each(module, "PosixPath PurePosixPath"), _PATH)
    found[Global("signal", "Signals")] = _ENUM
    found[Global("types", "SimpleNamespace")] = Use(reduce=_none, state=_attributes)
    found[Global("uuid", "UUID")] = _OBJECT
    found[Global("uuid", "SafeUUID")] = _ENUM
    return found


def _numpy() -> Mapping[Global, Use]:
    found = {}
    for core in ("numpy.core", "numpy._core"):  # numpy 1, and numpy 2
        found[Global(f"{core}.multiarray", "_reconstruct")] = Use(reduce=_empty_array, state=_array_state)
        found[Global(f"{core}.multiarray", "scalar")] = Use(reduce=_scalar)
        found[Global(f"{core}.numeric", "_frombuffer")] = Use(reduce=_from_buffer)
    found[_NUMPY_DTYPE] = Use(reduce=_dtype_args, state=_always)
    scalars = "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    found |= dict.fromkeys(
        _each("numpy", f"ndarray bool {scalars} str_ bytes_ object_ void datetime64 timedelta64"), _NAME
    )
    kinds = "Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float16 Float32 Float64 Complex64 Complex128"
    found |= dict.fromkeys(
        _each("numpy.dtypes", " ".join(f"{kind}DType" for kind in f"{kinds} Bytes Str Object Void".split())), _NAME
    )
    found |= dict.fromkeys((*_BIT_GENERATORS, _SEEDS), _NAME)
    found[_BIT_GENERATOR] = Use(reduce=_bit_generator, state=_always)
    found |= dict.fromkeys(
        _each("numpy.random._pickle", "__generator_ctor __randomstate_ctor"),
        Use(reduce=_of_bit_generator, state=_always),
    )
    found[Global("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence")] = Use(reduce=_seeds, state=_always)
    return found


def _torch() -> Mapping[Global, Use]:
    found = dict.fromkeys(_each("torch", _DTYPES), _NAME)
    quantized = "QUInt8Storage QInt8Storage QInt32Storage QUInt4x2Storage QUInt2x4Storage"
    found |= dict.fromkeys(
        _each("torch", f"{' '.join(STORAGE_DTYPES)} {quantized} UntypedStorage Tensor strided"), _NAME
    )
    schemes = "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric"
    found |= dict.fromkeys(_each("torch", f"{schemes} per_channel_affine_float_qparams"), _NAME)
    found |= dict.fromkeys(_each("torch.storage", "UntypedStorage TypedStorage"), _NAME)
    found |= dict.fromkeys(_each("torch.nn.parameter", "Parameter Buffer"), _NAME)
    found |= dict.fromkeys(_REBUILDS, _NAME)
    found[Global("torch._tensor", "_rebuild_from_type_v2")] = Use(reduce=_subclass)
    found[Global("torch", "Size")] = _NAME  # the machine makes tuples of sizes
    found[Global("torch", "device")] = Use(reduce=_device)
    found[Global("torch.serialization", "_get_layout")] = Use(reduce=_one_string)
    found[Global("torch.torch_version", "TorchVersion")] = Use(new=_one_string)
    return found


def _torch_distributed() -> Mapping[Global, Use]:
    found: dict[Global, Use] = {}
    dcp, shard = "torch.distributed.checkpoint", "torch.distributed._shard"
    metadata = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta"
    found |= dict.fromkeys(_each(f"{dcp}.metadata", metadata), _OBJECT)
    found |= dict.fromkeys(_each(f"{dcp}.filesystem", "_StorageInfo _StoragePrefix"), _OBJECT)
    found |= dict.fromkeys(_each(f"{dcp}.planner", "SavePlan WriteItem TensorWriteData BytesIOWriteData"), _OBJECT)
    found[Global(f"{dcp}.planner", "WriteItemType")] = _ENUM
    properties = Use(new=_none, state=lambda state: _properties(state) or _attributes(state))
    for module, encoding in ((f"{dcp}.metadata", "_MEM_FORMAT"), (f"{shard}.sharded_tensor.metadata", "MEM_FORMAT")):
        found[Global(module, "TensorProperties")] = properties
        found[Global(module, f"{encoding}_ENCODING")] = _ENUM
    found |= dict.fromkeys(_each(f"{shard}.sharded_tensor.metadata", "ShardedTensorMetadata"), _OBJECT)
    found |= dict.fromkeys(_each(f"{shard}.metadata", "ShardMetadata"), _OBJECT)
    found |= dict.fromkeys(_each(f"{shard}.sharding_spec.api", "EnumerableShardingSpec"), _OBJECT)
    found |= dict.fromkeys(_each(f"{shard}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"), _OBJECT)
    found |= dict.fromkeys(_each("torch.distributed.remote_device", "_remote_device"), _OBJECT)
    placements = "Shard Replicate Partial _StridedShard"
    for module in ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types"):
        found |= dict.fromkeys(_each(module, placements), _OBJECT)
    return found


def _deepspeed() -> Mapping[Global, Use]:
    found = dict.fromkeys(_each("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler"), _OBJECT)
    found |= dict.fromkeys(_each("deepspeed.runtime.fp16.loss_scaler", "LossScaleProfile"), _ENUM)
    found |= dict.fromkeys(_each("deepspeed.runtime.zero.config", "ZeroStageEnum"), _ENUM)
    found |= dict.fromkeys(_each("deepspeed.utils.tensor_fragment", "fragment_address"), _OBJECT)
    found |= dict.fromkeys(_each("deepspeed.runtime.bf16_optimizer", "fragment_address"), _OBJECT)  # before 0.7.1
    found |= dict.fromkeys(_each("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), _OBJECT)
    return found


def _megatron() -> Mapping[Global, Use]:
    core = "megatron.core"
    found = dict.fromkeys(_each(f"{core}.enums", "ModelType Fp8Recipe Fp4Recipe"), _ENUM)
    kinds = "LayerType AttnType AttnMaskType"
    found |= dict.fromkeys(_each(f"{core}.transformer.enums", f"ModelType {kinds} AttnBackend CudaGraphScope"), _ENUM)
    reruns = "RerunMode RerunState RerunDiagnostic RerunValidationStatus"
    found |= dict.fromkeys(_each(f"{core}.rerun_state_machine", reruns), _ENUM)
    found |= dict.fromkeys(_each(f"{core}.optimizer.optimizer_config", "OptimizerConfig"), _OBJECT)
    found |= dict.fromkeys(_each(f"{core}.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"), _OBJECT)
    for module in ("megatron.model.enums", "megatron.legacy.model.enums", "megatron.enums"):  # Megatron-LM, -DeepSpeed
        found |= dict.fromkeys(_each(module, f"ModelType {kinds} PositionEmbeddingType"), _ENUM)
    return found


KNOWN: Mapping[Global, Use] = {
    **_python(), **_numpy(), **_torch(), **_torch_distributed(), **_deepspeed(), **_megatron()
}  # fmt: skip
"""The allow list."""


def permits(made: Inert) -> bool:
    """True if the object is made as those make it who write such pickles; its name must be in the list."""
    if not KNOWN[made.target].permits(made):
        return False
    return made.target != _NUMPY_DTYPE or _dtype(made)
