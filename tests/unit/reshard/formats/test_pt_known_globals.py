"""Which globals pickles may name: entries of the allow list are read and written back, all else is refused."""

import _compat_pickle
import argparse
import collections
import datetime
import functools
import io
import os
import pathlib
import pickle
import pickletools
import signal
import subprocess
import types
import uuid
import warnings

import numpy as np
import pytest

from reshard.errors import UnsafePickleError, UsageError
from reshard.formats.pt.emit import emit
from reshard.formats.pt.known_globals import KNOWN
from reshard.formats.pt.machine import load, rebuild_containers
from reshard.formats.pt.objects import Global
from reshard.formats.pt.trust import trusting

FRAMEWORKS = ("torch", "deepspeed", "megatron")


def read(data: bytes):
    return load(data, persistent_load=lambda key: key, rebuild=rebuild_containers, path="the file")


def refusal(data: bytes) -> str:
    with pytest.raises(UnsafePickleError) as caught:
        read(data)
    return str(caught.value)


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def named(name: Global) -> bytes:
    """A pickle of protocol 4 that says the name and nothing else."""
    return b"\x80\x04" + text(name.module) + text(name.name) + b"\x93."


def names_in(data: bytes) -> set[str]:
    strings, found = [], set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            found.add(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(strings[-2:]))
        elif "UNICODE" in opcode.name:
            strings.append(argument)
    return found


def same(one, other) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue() and one.tell() == other.tell()
    if isinstance(one, np.random.Generator):
        return one.integers(0, 1 << 60, 4).tolist() == other.integers(0, 1 << 60, 4).tolist()
    if isinstance(one, np.random.RandomState):
        return one.randint(0, 1 << 30, 4).tolist() == other.randint(0, 1 << 30, 4).tolist()
    if isinstance(one, np.random.SeedSequence):
        return one.state == other.state
    if isinstance(one, np.random.BitGenerator):
        return one.random_raw(4).tolist() == other.random_raw(4).tolist()
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is object:
        return type(other) is object
    return type(one) is type(other) and one == other


def older(data: bytes) -> bytes:
    """The same as numpy 1 writes it, whose modules have other names."""
    for core in (b"multiarray", b"numeric"):
        new, old = b"numpy._core." + core, b"numpy.core." + core
        data = data.replace(b"c" + new + b"\n", b"c" + old + b"\n")
        data = data.replace(b"\x8c" + bytes([len(new)]) + new, b"\x8c" + bytes([len(old)]) + old)
    return data[:2] + data[11:] if data[2:3] == b"\x95" else data  # without the frame, whose length is another


SCALARS = [np.float64(1.5), np.int32(-4), np.bool_(True), np.str_("ab"), np.bytes_(b"ab"), np.datetime64("2026-01-02")]
NUMPY_TYPES = (
    "ndarray bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    " str_ bytes_ object_ void datetime64 timedelta64"
)
NUMPY_DTYPES = (
    "Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float16 Float32 Float64 Complex64 Complex128 Bytes Str"
    " Object Void"
)
ARRAYS = [
    np.arange(6, dtype="<i8").reshape(2, 3),
    np.asfortranarray(np.ones((2, 3), dtype=">f4")),
    np.zeros((0, 3)),
    np.array(["a", "bcd"]),
    np.array([b"a"]),
    np.array([True]),
    np.array(1 + 2j),
    np.array([None, "x", 3], dtype=object),
    np.array(["2026-01-02"], dtype="M8[ns]"),
    np.array([b"abcd"], dtype="V4"),
]
EXAMPLES = [
    {1, "a"},
    frozenset([1]),
    bytearray(b"a\xff"),
    bytearray(),
    b"\xff",
    b"",
    1 + 2j,
    range(1, 9, 2),
    slice(1, None),
    object(),
    ...,
    bool,
    bytes,
    dict,
    float,
    frozenset,
    int,
    list,
    set,
    str,
    tuple,
    io.BytesIO(b"abc\xff"),
    argparse.Namespace(a=1, b=argparse.Namespace(c=[2])),
    types.SimpleNamespace(a=1),
    collections.Counter([1, 1]),
    collections.OrderedDict(a=1),
    collections.deque([1, 2], 3),
    collections.deque(),
    collections.defaultdict(int, {1: 2}),
    collections.defaultdict(list),
    collections.defaultdict(None, {1: 2}),
    datetime.date(2026, 1, 2),
    datetime.time(1, 2),
    datetime.timedelta(1, 2, 3),
    datetime.datetime(2026, 1, 2, 3, 4),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "x")),
    pathlib.PosixPath("/a/b"),
    pathlib.PurePosixPath("c"),
    signal.SIGTERM,
    uuid.UUID(int=5),
    uuid.SafeUUID.safe,
    *SCALARS,
    *ARRAYS,
    *[np.dtype(code) for code in ("f4", ">i2", "U5", "S3", "O", "m8[s]")],
    *[getattr(np, name) for name in NUMPY_TYPES.split()],
    *[getattr(np.dtypes, f"{k}DType") for k in NUMPY_DTYPES.split()],
    np.random.get_state(),
    np.random.RandomState(1),
    np.random.default_rng(1),
    np.random.SeedSequence(3),
    *[kind(1) for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)],
]
READ_ONLY = np.arange(3.0)
READ_ONLY.flags.writeable = False
PICKLES = [
    *[pickle.dumps(value, protocol) for protocol in (2, 3, 4) for value in EXAMPLES],
    *[pickle.dumps(value, 5) for value in [READ_ONLY, READ_ONLY[:0], np.float64(1), collections.Counter([1])]],
]
OF_NUMPY_1 = [older(data) for data in PICKLES if b"numpy._core" in data]

UNWRITTEN = {
    "pathlib._local.PosixPath": "Python 3.13",
    "pathlib._local.PurePosixPath": "Python 3.13",
    "numpy.bool_": "numpy 1",
    "__builtin__.int": "Python 2",
    "__builtin__.str": "Python 2",
}
"""Entries that this Python does not write."""


OF_PYTHON = [str(name) for name in KNOWN if name.module.partition(".")[0] not in FRAMEWORKS]


@pytest.mark.parametrize("name", KNOWN, ids=str)
def test_every_entry_of_the_allow_list_is_read_and_written_back_as_it_is(name):
    value = read(named(name))
    assert value == name
    assert names_in(emit([value])[0]) == {str(name)}


@pytest.mark.parametrize("name", sorted({*OF_PYTHON} - {*UNWRITTEN}))
def test_every_entry_of_python_and_numpy_is_in_the_pickle_of_a_real_object_that_survives(name):
    chosen = [data for data in [*PICKLES, *OF_NUMPY_1] if name in names_in(data)]
    assert chosen
    for data in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy 2 says that numpy.core has moved
            assert same(pickle.loads(data), pickle.loads(emit(read(data))[0]))


def test_names_of_python_2_in_the_list_lead_to_names_in_the_list():
    """`reshard` writes protocol 2, in which a loader replaces some names."""
    for name in KNOWN:
        module, attribute = _compat_pickle.NAME_MAPPING.get((name.module, name.name), (None, None))
        if module is None:
            module, attribute = _compat_pickle.IMPORT_MAPPING.get(name.module, name.module), name.name
        assert Global(module, attribute) in KNOWN, name


RUNS_CODE: list[str] = """
    cProfile.run profile.run torch.hub.load _posixsubprocess.fork_exec functools.partial functools.reduce
    os.system posix.system nt.system os.path.exists builtins.eval builtins.exec builtins.getattr builtins.setattr
    builtins.__import__ builtins.open builtins.type builtins.print builtins.map builtins.compile __builtin__.eval
    __builtin__.apply __builtin__.reduce torch.load torch.save torch.jit.load torch.package.PackageImporter
    torch._dynamo.debug_utils.run_fwd_maybe_bwd torch._inductor.codecache.PyCodeCache
    torch.utils.cpp_extension.load_inline torch.utils.collect_env.run torch.distributed.rpc.rpc_sync
    torch.ops.load_library torch.serialization.load torch._utils._import_dotted_name
    torch.storage._load_from_bytes torch.nn.Module torch.multiprocessing.reductions.rebuild_storage_filename
    numpy.load numpy.fromfile numpy.memmap numpy.testing._private.utils.runstring numpy.f2py.compile
    numpy.lib.npyio.load numpy.distutils.exec_command.exec_command copyreg._reconstructor copyreg.__newobj__
    copy_reg._reconstructor operator.attrgetter operator.methodcaller itertools.starmap _io.FileIO io.open
    _io.StringIO types.FunctionType types.CodeType code.InteractiveInterpreter timeit.timeit pdb.run bdb.Bdb
    trace.Trace doctest.debug_script runpy.run_path pydoc.pipepager ctypes.CDLL pickle.loads _pickle.loads
    marshal.loads dill.loads cloudpickle.loads joblib.load shelve.open logging.config.listen subprocess.Popen
    subprocess.check_output commands.getoutput multiprocessing.util.spawnv_passfds pathlib.Path.unlink
    pathlib.Path shutil.rmtree importlib.import_module pkgutil.resolve_name site.main sys.exit gc.collect
    socket.socket urllib.request.urlopen webbrowser.open smtplib.SMTP asyncio.run ensurepip.bootstrap pip.main
    venv.create lib2to3.pgen2.grammar.Grammar.loads uuid._get_command_stdout re._compile decimal.Decimal
    fractions.Fraction collections.namedtuple _codecs.decode codecs.encode argparse.FileType signal.signal
    datetime.sys.exit deepspeed.runtime.utils.call_to_str deepspeed.launcher.runner.main
    megatron.core.utils.get_attr_wrapped_model megatron.core.rerun_state_machine.os
""".split()  # noqa: SIM905 (a name a line would be longer than all tests)


@pytest.mark.parametrize("name", RUNS_CODE)
def test_a_name_that_is_not_in_the_list_is_refused_by_name_however_it_is_said(name):
    module, _, attribute = name.rpartition(".")
    call = b"(" + text("touch executed") + b"tR."
    for data in (
        b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + call,
        b"\x80\x04" + text(module) + text(attribute) + b"\x93" + call,
        b"\x80\x04" + text(module) + text(attribute) + b"\x93N0N.",  # named, and then dropped
        b"\x80\x02}X\x01\x00\x00\x00ac" + f"{module}\n{attribute}\n".encode() + b"s.",  # only a value
    ):
        message = refusal(data)
        assert f"the file: its pickle names {name}" in message
        assert "hint: " in message


DOTTED = [
    ("torch", "nn.Module.load_state_dict"),
    ("torch", "hub.load"),
    ("torch", "Tensor.__reduce_ex__"),
    ("pathlib", "PosixPath.unlink"),
    ("argparse", "Namespace.__init__.__globals__"),
    ("os", "path.join"),
    ("collections", "OrderedDict.__class__"),
    ("collections", "abc.sys.modules"),
    ("numpy", "dtype.__reduce__"),
    ("argparse", "_sys.modules"),
    ("signal", "Signals.__members__"),
    ("torch.torch_version", "Any.__class__"),
]


@pytest.mark.parametrize("module, name", DOTTED)
def test_a_name_that_reaches_through_an_accepted_one_is_refused(module, name):
    assert f"names {module}.{name}" in refusal(named(Global(module, name)))
    with pytest.raises(UsageError), trusting([f"{module}.{name}"]):
        pass


def test_a_trusted_name_split_in_another_way_is_another_name():
    with trusting(["mine.Outer.Inner"]):
        assert "names mine.Outer.Inner" in refusal(named(Global("mine", "Outer.Inner")))


def g(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


DTYPE = g("numpy.dtype") + b"(" + text("O8") + b"\x89\x88tR"
PLAIN_DTYPE = g("numpy.dtype") + b"(" + text("f8") + b"\x89\x88tR"
ARRAY = g("numpy._core.multiarray._reconstruct") + b"(" + g("numpy.ndarray") + b"K\x00\x85C\x01btR"
BIG = b"\x8a\x08" + (1 << 60).to_bytes(8, "little")
MISUSED = {
    "a class built of a function's state": (
        g("argparse.Namespace") + b")\x81}" + text("__class__") + b"Nsb",
        "argparse.Namespace",
    ),
    "a setter for the next state": (
        g("argparse.Namespace") + b")\x81}" + text("__setstate__") + g("_codecs.encode") + b"sb",
        "argparse.Namespace",
    ),
    "slots": (g("argparse.Namespace") + b")\x81N}" + text("__dict__") + b"}s\x86b", "argparse.Namespace"),
    "another codec": (g("_codecs.encode") + b"(" + text("a") + text("zip") + b"tR", "_codecs.encode"),
    "memory by a number": (g("builtins.bytearray") + BIG + b"\x85R", "builtins.bytearray"),
    "bytes by a number": (g("builtins.bytes") + BIG + b"\x85R", "builtins.bytes"),
    "a list of a range": (g("builtins.list") + g("builtins.range") + BIG + b"\x85R\x85R", "builtins.list"),
    "a set of a range": (g("builtins.set") + g("builtins.range") + BIG + b"\x85R\x85R", "builtins.set"),
    "a deque of a range": (g("collections.deque") + g("builtins.range") + BIG + b"\x85R\x85R", "collections.deque"),
    "a factory that is no type": (
        g("collections.defaultdict") + g("torch.device") + b"\x85R",
        "collections.defaultdict",
    ),
    "a new enumeration": (
        g("deepspeed.runtime.zero.config.ZeroStageEnum") + b"(" + text("X") + text("a b") + b"tR",
        "ZeroStageEnum",
    ),
    "a member of an enumeration with a state": (
        g("deepspeed.runtime.zero.config.ZeroStageEnum") + b"K\x01\x85R}" + text("_value_") + b"K\x03sb",
        "ZeroStageEnum",
    ),
    "a type that is called": (g("torch.Tensor") + BIG + b"\x85R", "torch.Tensor"),
    "a storage that is called": (g("torch.FloatStorage") + BIG + b"\x85R", "torch.FloatStorage"),
    "a constant that is called": (g("torch.float32") + b")R", "torch.float32"),
    "a constant that is made": (g("torch.float32") + b")\x81", "torch.float32"),
    "a size of something else": (g("torch.Size") + b"(NNtR", "torch.Size"),
    "a constructor instead of __new__": (g("argparse.Namespace") + b")R", "argparse.Namespace"),
    "a loss scaler that is called": (
        g("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler") + b")R",
        "DynamicLossScaler",
    ),
    "items for what is no list": (g("argparse.Namespace") + b")\x81(K\x01e", "argparse.Namespace"),
    "pairs for what is no dict": (g("argparse.Namespace") + b")\x81(K\x01K\x02u", "argparse.Namespace"),
    "a tensor rebuilt by something else": (
        g("torch._tensor._rebuild_from_type_v2") + b"(" + g("torch.device") + g("torch.Tensor") + b")}tR",
        "torch._tensor._rebuild_from_type_v2",
    ),
    "a generator by another factory": (
        g("numpy.random._pickle.__generator_ctor") + b"(" + text("PCG64") + g("torch.device") + b"tR",
        "__generator_ctor",
    ),
    "a huge array of nothing": (
        g("numpy._core.multiarray._reconstruct") + b"(" + g("numpy.ndarray") + BIG + b"\x85C\x01btR",
        "_reconstruct",
    ),
    "an array of another class": (
        g("numpy._core.multiarray._reconstruct") + b"(" + g("torch.Tensor") + b"K\x00\x85C\x01btR",
        "_reconstruct",
    ),
    "pointers in the bytes of an array": (
        ARRAY + b"(K\x01K\x01\x85" + DTYPE + b"\x89C\x08" + b"\x41" * 8 + b"tb",
        "_reconstruct",
    ),
    "fewer objects than the array has": (ARRAY + b"(K\x01K\x05\x85" + DTYPE + b"\x89]tb", "_reconstruct"),
    "objects that the type denies": (
        DTYPE + b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        "numpy.dtype",
    ),
    "a type of another size than its name": (
        PLAIN_DTYPE + b"(K\x03" + text("<") + b"NNNJ\x00\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        "numpy.dtype",
    ),
    "a type with fields": (
        g("numpy.dtype")
        + b"("
        + text("V8")
        + b"\x89\x88tR(K\x03"
        + text("|")
        + b"N"
        + text("a")
        + b"\x85}K\x08K\x01K\x10tb",
        "numpy.dtype",
    ),
    "a type by a description": (g("numpy.dtype") + b"(" + text("f8,O") + b"\x89\x88tR", "numpy.dtype"),
    "a scalar of a pointer": (
        g("numpy._core.multiarray.scalar") + b"(" + DTYPE + b"C\x08" + b"\x41" * 8 + b"tR",
        "multiarray.scalar",
    ),
    "a path of something else": (g("pathlib.PosixPath") + g("argparse.Namespace") + b")\x81\x85R", "pathlib.PosixPath"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_an_accepted_name_is_refused_where_it_is_used_as_nobody_uses_it(case):
    data, name = MISUSED[case]
    message = refusal(b"\x80\x02" + data + b".")
    assert name in message
    assert "with arguments or a state that nobody writes" in message


OPCODES = {
    "INST": b"(S'id'\nios\nsystem\n.",
    "OBJ": b"(cargparse\nNamespace\no.",
    "EXT1": b"\x82\x01.",
    "EXT2": b"\x83\x01\x00.",
    "EXT4": b"\x84\x01\x00\x00\x00.",
    "NEWOBJ_EX": b"cargparse\nNamespace\n)}\x92.",
    "PERSID": b"P0\n.",
    "GET": b"g0\n.",
    "a protocol 0 string": b"S'a'\n.",
    "READONLY_BUFFER": b"N\x98.",
    "NEXT_BUFFER": b"\x97.",
}


@pytest.mark.parametrize("opcode", OPCODES)
def test_opcodes_that_reach_other_names_are_not_read(opcode):
    assert "is not used for plain data" in refusal(b"\x80\x02" + OPCODES[opcode])


def test_a_state_on_a_class_itself_is_not_set():
    with pytest.raises(Exception, match="a state is set on a Global"):
        read(b"\x80\x02" + g("argparse.Namespace") + b"}" + text("__reduce__") + b"Nsb.")


def test_a_name_made_of_other_things_than_strings_is_no_name():
    with pytest.raises(Exception, match="a name is not a string"):
        read(b"\x80\x04" + g("argparse.Namespace") + text("a") + b"\x93.")


class Own:
    pass


class Reduced:
    def __reduce_ex__(self, _protocol):
        return os.system, ("touch executed",)


def test_a_class_of_the_user_is_refused_with_its_name_its_place_and_what_to_do():
    data = pickle.dumps({"client": {"callbacks": [1, Own()]}}, 2)
    name = f"{Own.__module__}.Own"
    message = refusal(data)
    assert f"the file: its pickle names {name}: expected only what DeepSpeed, torch" in message
    assert f"  - {name} at client.callbacks.1" in message
    assert f"--allow-global {name}" in message


def test_all_refused_names_are_told_at_once():
    message = refusal(b"\x80\x02](" + b"".join(g(f"mine.C{number}") for number in range(30)) + b"e.")
    assert "its pickle names mine.C0 and 29 more" in message
    assert "mine.C19 at 19\n" in message
    assert "and 10 more" in message


def test_what_names_are_refused_is_told_of_a_pickle_that_breaks_off():
    assert "its pickle names os.system" in refusal(b"\x80\x02cos\nsystem\n(" + text("id") + b"tR")


def test_a_name_with_control_characters_does_not_reach_the_terminal():
    assert "\x1b" not in refusal(b"\x80\x04" + text("\x1b]52;c;x\x07") + text("a\nb") + b"\x93.")


def test_a_trusted_name_is_read_and_written_and_only_within_its_block():
    data = pickle.dumps({"mine": Own()}, 2)
    with trusting([f"{Own.__module__}.Own"]):
        value = read(data)
        assert names_in(emit(value)[0]) == {f"{Own.__module__}.Own"}
        assert "os" in refusal(pickle.dumps([Own(), Reduced()], 2))
    refusal(data)
    with pytest.raises(UnsafePickleError, match="may be written"):
        emit(value)


@pytest.mark.parametrize("name", ["", "one", "a..b", ".a", "a.", "a.b c", "a.b\n", "a.1", "a-b.c", "é.a", "*", "a.*"])
def test_a_trusted_name_is_one_exact_name(name):
    with pytest.raises(UsageError, match="expected the full name of one global"), trusting([name]):
        pass


NEVER: list[str] = """
    os.system posix.system builtins.eval __builtin__.eval subprocess.Popen functools.partial cProfile.run profile.run
    bdb.Bdb trace.Trace doctest.run_docstring _thread.start_new_thread types.FunctionType io.open _io.open io.FileIO
    torch.load torch.serialization.load torch.hub.load torch.multiprocessing.spawn numpy.load
    numpy.testing._private.utils.runstring _frozen_importlib._gcd_import _xxsubinterpreters.run_string imp.load_source
    distutils.spawn.spawn concurrent.futures.ProcessPoolExecutor posixpath.os.system six.moves.builtins.eval
    mine.six.moves.builtins.eval mine.os.system commands.getoutput cPickle.loads uuid._get_command_stdout
    collections.namedtuple collections.abc.sys.Exit torch.nn.functional.os.system annotationlib.ForwardRef
""".split()  # noqa: SIM905 (a name a line would be longer than all tests)


@pytest.mark.parametrize("name", NEVER)
def test_what_runs_what_the_file_says_cannot_be_trusted_at_all(name):
    with pytest.raises(UsageError, match="is never allowed"), trusting([name]):
        pass
    assert "--allow-global" not in refusal(named(Global(*name.rsplit(".", 1))))


DATA: list[str] = """
    decimal.Decimal fractions.Fraction ipaddress.IPv4Address uuid.UUID datetime.datetime collections.UserDict enum.Enum
    pathlib.WindowsPath zoneinfo.ZoneInfo random.Random exceptions.ValueError logging.getLogger
    torch.optim.lr_scheduler.LambdaLR torch.nn.modules.linear.Linear torch.distributed.fsdp.api.MixedPrecision
    __main__.Progress mine.types.State torchvision.ops.Conv2dNormActivation numpy.dtype argparse.Namespace
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", DATA)
def test_data_and_classes_of_the_training_can_be_trusted(name):
    with trusting([name]):
        read(named(Global(*name.rsplit(".", 1))))


class Outer:
    class Inner:
        def method(self):
            pass


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Outer.Inner(), "defined inside of others"),
        (Outer.Inner().method, "without methods"),
        (type(None), "type can run code and is never allowed: convert the object to plain data"),
        (functools.partial(Own), "functools.partial can run code and is never allowed"),
        (len, "len can run code"),
        (os.system, "do not load this file with anything"),
        (subprocess.run, "do not load this file with anything"),
        (eval, "do not load this file with anything"),
        (subprocess.CompletedProcess("a", 0), "CompletedProcess can run code"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_only_what_runs_code_or_commands_is_called_an_attack(value, advice, protocol):
    assert advice in refusal(pickle.dumps({"value": value}, protocol)).partition("hint: ")[2]


def test_a_loaded_result_of_a_hostile_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "system" in refusal(pickle.dumps({"a": Reduced()}, 2))
    assert not list(tmp_path.iterdir())
