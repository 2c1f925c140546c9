"""`.metadata` decoded in columns says what it says read opcode by opcode, whatever pickler wrote it, damaged or not."""

import io
import pickle
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import ReshardError
from reshard.formats.dcp.metadata import read_metadata
from reshard.formats.pt import machine
from reshard.formats.pt.columns import load_columns
from tests.randomness import examples

MODULE = "torch.distributed.checkpoint.metadata"


class Record:
    """An object whose state is its attributes, as those of torch's data classes are."""

    def __init__(self, **state) -> None:
        self.__dict__.update(state)


def torch_class(name: str, module: str = MODULE) -> type:
    return type(name, (Record,), {"torch_module": module})


CHUNK, TENSOR, BYTES = (torch_class(f"{name}StorageMetadata") for name in ("Chunk", "Tensor", "Bytes"))
INDEX, METADATA = torch_class("MetadataIndex"), torch_class("Metadata")
INFO = torch_class("_StorageInfo", "torch.distributed.checkpoint.filesystem")


class Function:
    def __init__(self, module: str, name: str) -> None:
        self.torch_module, self.__qualname__ = module, name

    def __call__(self) -> None:
        raise NotImplementedError


SIZE, LAYOUT = Function("torch", "Size"), Function("torch.serialization", "_get_layout")
FLOAT32 = Function("torch", "float32")


class Size(tuple):
    def __reduce__(self):
        return SIZE, (tuple(self),)


class Layout:
    def __reduce__(self):
        return LAYOUT, ("torch.strided",)


class Properties(torch_class("TensorProperties")):
    torch_module, __qualname__ = MODULE, "TensorProperties"

    def __getstate__(self):
        return (FLOAT32, LAYOUT_, False)


LAYOUT_ = Layout()


class Pickler(pickle._Pickler):
    """Writes names of torch without torch."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_global(self, obj, name=None):
        if self.proto < 4:
            self.write(b"c" + f"{obj.torch_module}\n{obj.__qualname__}\n".encode())
        else:
            self.save(obj.torch_module)
            self.save(obj.__qualname__)
            self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    def save_type(self, obj):
        self.save_global(obj)

    dispatch[type] = save_type
    dispatch[Function] = save_global


def dumped(value, protocol: int, batch: int) -> bytes:
    stream = io.BytesIO()
    pickler = Pickler(stream, protocol)
    pickler._BATCHSIZE = batch
    pickler.dump(value)
    return stream.getvalue()


def fresh(text: str) -> str:
    """An equal string that is another object, as those of different processes are."""
    return "".join(list(text))


@st.composite
def states(draw):
    """Metadata with chunks of every tensor on many ranks, and its strings shared or not."""
    tensors, storage, described = draw(st.integers(1, 5)), [], {}
    share_key, share_file, add_none = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    step = draw(st.sampled_from([1, 300, 70_000, 1 << 31, 1 << 40]))
    for number in range(tensors):
        key = "m." + draw(st.sampled_from(["w", "bias", "ünicode", "x" * 300])) + str(number)
        if draw(st.integers(0, 5)) == 0:
            described[key] = BYTES()
            storage.append((0, INDEX(fqn=key, index=None), number))
            continue
        ndim, count = draw(st.integers(0, 4)), draw(st.integers(1, 12))
        count = count if ndim else 1
        rest = tuple(draw(st.integers(1, 300)) for _ in range(ndim - 1))
        rows = [draw(st.integers(0, 3)) for _ in range(count)] if ndim else []
        starts = [sum(rows[:at]) * step for at in range(count)]
        boxes = [
            ((starts[at], *(0 for _ in rest)), (rows[at] * step, *rest)) if ndim else ((), ()) for at in range(count)
        ]
        boxes = list(dict.fromkeys(boxes)) if draw(st.booleans()) else boxes
        chunks = [CHUNK(offsets=Size(offset), sizes=Size(size)) for offset, size in boxes]
        shape = (sum(rows) * step, *rest) if ndim else ()
        described[key] = TENSOR(properties=Properties(), size=Size(shape), chunks=chunks)
        for rank, (offset, _) in enumerate(dict.fromkeys(boxes)):
            name = key if share_key else fresh(key)
            more = {"index": rank} if not add_none or rank % 3 else {"index": None}
            storage.append((rank, INDEX(fqn=name, **more, offset=Size(offset)), number))
    files = [f"__{rank}_0.distcp" for rank in range(13)]
    storage.sort(key=lambda item: item[0])
    stored = {
        index: INFO(
            relative_path=files[rank] if share_file else fresh(files[rank]), offset=at * step, length=1500 + number
        )
        for at, (rank, index, number) in enumerate(storage)
    }
    return METADATA(state_dict_metadata=described, planner_data=None, storage_data=stored, version="1.0.0")


def outcome(folder: Path, *, in_columns: bool):
    try:
        entries = read_metadata(folder, in_columns=in_columns)
    except ReshardError as error:
        return type(error), str(error)
    return [(entry.key, entry.path, entry.shape, entry.dtype, tuple(entry.chunks)) for entry in entries]


def same_both_ways(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / ".metadata").write_bytes(data)
        found = outcome(folder, in_columns=True)
        assert found == outcome(folder, in_columns=False)
        return found


protocols = st.sampled_from([2, 4, 5])
batches = st.sampled_from([2, 3, 5, 1000])


@settings(max_examples=examples(60), deadline=None)
@given(state=states(), protocol=protocols, batch=batches)
def test_columns_say_what_objects_say(state, protocol, batch):
    same_both_ways(dumped(state, protocol, batch))


@settings(max_examples=examples(60), deadline=None)
@given(state=states(), protocol=protocols, batch=batches, chance=st.randoms(use_true_random=False))
def test_damaged_metadata_meets_the_same_end_both_ways(state, protocol, batch, chance: random.Random):
    data = bytearray(dumped(state, protocol, batch))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data))
        if chance.random() < 0.6:
            data[at] = chance.choice((chance.randrange(256), data[chance.randrange(len(data))]))
        elif chance.random() < 0.5:
            del data[at : at + chance.randrange(1, 12)]
        else:
            other = chance.randrange(len(data))
            data[at:at] = data[other : other + chance.randrange(1, 40)]
    same_both_ways(bytes(data))


@pytest.mark.parametrize("num_bytes", [0, 1 << 20, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_frame_of_any_stated_length_changes_nothing(num_bytes: int):
    data = bytearray(dumped(regular(4, 6), 4, 1000))
    undisturbed = same_both_ways(bytes(data))
    assert data[2:3] == pickle.FRAME
    data[3:11] = num_bytes.to_bytes(8, "little")  # how long a frame is only helps a reader's buffer

    assert same_both_ways(bytes(data)) == undisturbed


def regular(num_tensors: int, num_ranks: int):
    """Metadata as a run of equal ranks leaves it."""
    described, stored = {}, {}
    for number in range(num_tensors):
        chunks = [CHUNK(offsets=Size((rank * 128, 0)), sizes=Size((128, 9))) for rank in range(num_ranks)]
        size = Size((128 * num_ranks, 9))
        described[f"layers.{number}.weight"] = TENSOR(properties=Properties(), size=size, chunks=chunks)
    for rank in range(num_ranks):
        name = f"__{rank}_0.distcp"
        for at, key in enumerate(described):
            index = INDEX(fqn=fresh(key), index=rank, offset=Size((rank * 128, 0)))
            stored[index] = INFO(relative_path=name, offset=6000 * at, length=6000)
    return METADATA(state_dict_metadata=described, planner_data=None, storage_data=stored, version="1.0.0")


def test_all_but_the_first_records_of_their_kind_are_columns():
    data = dumped(regular(40, 50), 4, 1000)
    found, has_batches = load_columns(data, persistent_load=str, rebuild=machine.rebuild_containers, path="metadata")
    state = found.state
    assert has_batches
    assert sum(batch.count for batch in state["storage_data"].batches) > 1950
    assert len(state["storage_data"]) + sum(batch.count for batch in state["storage_data"].batches) == 2000
    assert len(same_both_ways(data)) == 40


def test_a_pickle_that_refers_to_an_object_of_a_record_is_read_without_columns():
    state = regular(3, 20)
    chunks = [chunk for tensor in state.state_dict_metadata.values() for chunk in tensor.chunks]
    chunks[30].sizes = chunks[25].sizes
    data = dumped(state, 4, 1000)
    assert load_columns(data, persistent_load=str, rebuild=machine.rebuild_containers, path="")[1] is False
    assert len(same_both_ways(data)) == 3
