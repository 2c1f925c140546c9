"""Names in a checkpoint's pickles: hostile ones are refused in files of every format, and results are clean."""

import io
import json
import pickletools
import shutil
import zipfile
from pathlib import Path

import pytest

from elastic_trainer.virtual import open_virtual_commit
from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode
from reshard.errors import UnsafePickleError
from reshard.formats.pt.known_globals import KNOWN
from reshard.formats.pt.objects import Global, Inert
from reshard.topology import Topology
from tests.golden.dcp_files import edit_metadata, items, stored
from tests.golden.files import edit

HERE = Path(__file__).parent
STEP = "step-00000002"
DEEPSPEED = HERE / "deepspeed-0.19.8/zero2-dp3" / STEP
SOURCES = sorted(
    [*HERE.glob(f"deepspeed-0.19.8/*/{STEP}"), *HERE.glob(f"dcp-2.13/*/{STEP}"), *HERE.glob("megatron-0.16.1/iter_*")]
)
ATTACKS = {
    "cProfile.run": ("import os; os.system('touch executed')",),
    "torch.hub.load": ("a/b", "c"),
    "_posixsubprocess.fork_exec": (),
    "functools.partial": (Global("os", "system"), "touch executed"),
    "torch.load": ("x",),
    "numpy.load": ("x",),
    "copyreg._reconstructor": (Global("torch.nn.modules.module", "Module"), Global("builtins", "object"), None),
    "torch._dynamo.debug_utils.BuckTargetWriter": ("x",),
    "mine.Progress": (1,),
}


FOREIGN = {
    "a dataclass": Inert("new", Global("train", "MyState"), (), {"epoch": 3}),
    "an enumeration": Inert("reduce", Global("train", "Phase"), (2,)),
    "a named tuple": Inert("new", Global("train", "Progress"), (3, 0.5)),
    "a decimal": Inert("reduce", Global("decimal", "Decimal"), ("0.1",)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_class_of_the_training_in_its_client_state_is_not_called_damage(kind, tmp_path, capsys):
    """DeepSpeed loads `client_state={"trainer": MyState(...)}`; a checkpoint with it is sound."""
    folder = Path(shutil.copytree(DEEPSPEED, tmp_path / "source"))
    edit(folder, "mp_rank_00_model_states.pt", lambda value: value.update(trainer=FOREIGN[kind]))
    code = main(["run", str(folder), str(tmp_path / "out"), "--to", "dp=2"])
    assert code == ExitCode.UNSUPPORTED
    name = FOREIGN[kind].target
    assert f"--allow-global {name}" in capsys.readouterr().err
    assert main(["run", str(folder), str(tmp_path / "out"), "--to", "dp=2", "--allow-global", str(name)]) == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_tensors_of_a_class_of_their_own_are_not_converted_and_the_weights_are(tmp_path, capsys):
    """This is how torchao's 8-bit AdamW keeps its states; allowing the name does not help."""
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")

    from tests.golden.quantized import OptimState8bit

    states = {"exp_avg": OptimState8bit(torch.zeros(4, 3, dtype=torch.uint8), torch.ones(1)), "step": torch.tensor(3.0)}
    saved = {"model.w": torch.ones(4, 3), **{f"optim.state.w.{key}": value for key, value in states.items()}}
    checkpoint.save({**saved, "optim.param_groups.w.lr": 0.1}, checkpoint_id=tmp_path / "source", no_dist=True)
    words = ["run", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "dp=2"]
    assert main(words) == ExitCode.UNSUPPORTED
    told = capsys.readouterr().err
    assert "tests.golden.quantized.OptimState8bit" in told and "--allow-global" not in told
    assert "tensors of a class of their own" in told and "--states weight takes the weights alone" in told
    assert main([*words, "--allow-global", "tests.golden.quantized.OptimState8bit"]) == ExitCode.UNSUPPORTED
    assert main([*words, "--states", "weight"]) == 0


def attack(name: str) -> Inert:
    module, _, attribute = name.rpartition(".")
    return Inert("reduce", Global(module, attribute), ATTACKS[name])


def names_in(pickled: bytes) -> set[str]:
    """Every name, by the standard library's reading. What the resharder writes is of protocol 2."""
    found = {argument.replace(" ", ".") for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert not any(code.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1") for code, _, _ in pickletools.genops(pickled))
    return found


def names_of(folder: Path) -> set[str]:
    """All names in the pickles of a folder: its `.pt` files, items of DCP, and `.metadata`."""
    found: set[str] = set()
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if path.name == ".metadata":
            found |= names_in(data)
        while (end := data.find(b"PK\x05\x06")) >= 0:
            with zipfile.ZipFile(io.BytesIO(data[: end + 22])) as archive:
                for name in archive.namelist():
                    found |= names_in(archive.read(name)) if name.endswith("/data.pkl") else set()
            data = data[end + 22 :]
    return found


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_code_in_the_state_of_a_client_is_refused_by_name_file_and_place(name, file, tmp_path):
    source = shutil.copytree(DEEPSPEED, tmp_path / "in")
    edit(source, file, lambda value: value.update(client=[{"mine": attack(name)}]))
    with pytest.raises(UnsafePickleError) as caught:
        convert(Conversion(source=source, target=tmp_path / "out", topology=Topology(dp=2, zero=2)))
    assert f"{source / file}: its pickle names " in str(caught.value)
    assert f"\n  - {name} at client.0.mine" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_code_in_the_metadata_and_in_the_common_part_is_refused_by_name(name, tmp_path):
    dcp = shutil.copytree(HERE / "dcp-2.13/fsdp2-flat" / STEP, tmp_path / "dcp")
    edit_metadata(dcp, lambda state: state.update(planner_data={"a": attack(name)}))
    (megatron,) = HERE.glob("megatron-0.16.1/iter_*")
    common = shutil.copytree(megatron, tmp_path / "megatron")
    edit(common, "common.pt", lambda value: value.update(args=attack(name)))
    for folder in (dcp, common):
        with pytest.raises(UnsafePickleError, match=rf"names {name}"):
            index_of(folder)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parents[0].name}-{path.name}")
def test_every_real_checkpoint_names_only_what_is_known(source):
    assert index_of(source).tensors


@pytest.mark.parametrize("number", range(3))
def test_a_result_names_only_what_is_known(number, tmp_path):
    (megatron,) = HERE.glob("megatron-0.16.1/iter_*")
    source = [DEEPSPEED, HERE / "dcp-2.13/tp2-fsdp2-titan" / STEP, megatron][number]
    convert(Conversion(source=source, target=tmp_path / "out", topology=Topology(dp=2, zero=2)))
    assert names_of(tmp_path / "out")
    assert names_of(tmp_path / "out") <= {str(name) for name in KNOWN}


@pytest.fixture
def own(tmp_path) -> Path:
    """A checkpoint with an object of a class of its user."""
    source = shutil.copytree(DEEPSPEED, tmp_path / "in")
    mine = Inert("new", Global("mine", "Progress"), (), {"epoch": 3})
    edit(source, "mp_rank_00_model_states.pt", lambda value: value.update(mine=mine))
    return source


def test_an_allowed_name_is_carried_along_printed_and_recorded(own, tmp_path, capfd):
    target = tmp_path / "out"
    words = ["run", str(own), str(target), "--to", "dp=2"]
    assert main(words) == ExitCode.UNSUPPORTED
    assert "--allow-global mine.Progress" in capfd.readouterr().err
    assert main([*words, "--allow-global", "mine.Progress", "--allow-global", "mine.Other", "--reread"]) == 0
    assert "note: --allow-global: pickles of the result may name mine.Other, mine.Progress" in capfd.readouterr().err
    assert read_commit(target).options["allow_globals"] == "mine.Other,mine.Progress"
    assert "mine.Progress" in names_of(target)
    assert main(["verify", str(own), str(target), "--allow-global", "mine.Progress"]) == 0
    assert main(["verify", str(own), str(target)]) == ExitCode.UNSUPPORTED


def test_the_library_takes_allowed_names(own, tmp_path):
    wanted = Conversion(
        source=own, target=tmp_path / "out", topology=Topology(dp=2, zero=2), allow_globals=("mine.Progress",)
    )
    assert convert(wanted, RunOptions(reread=True)).ok
    assert "mine.Progress" in names_of(tmp_path / "out")


def test_a_virtual_conversion_takes_allowed_names_and_is_loaded_without_them(own, tmp_path):
    words = ["run", str(own), str(tmp_path / "v"), "--to", "dp=2", "--mode", "virtual"]
    assert main(words) == UnsafePickleError.exit_code
    assert main([*words, "--allow-global", "mine.Progress"]) == 0
    with open_virtual_commit(tmp_path / "v", ranks=range(2), scratch=tmp_path) as opened:
        assert "mine.Progress" in names_of(opened.folder)


@pytest.mark.parametrize("name", ["os.system", "no_name", "a.*"])
def test_what_cannot_be_allowed_is_an_error_of_usage(name, own, tmp_path, capfd):
    assert main(["run", str(own), str(tmp_path / "out"), "--to", "dp=2", "--allow-global", name]) == 2
    assert f"--allow-global {name!r}"[:-1].replace("'", "") in capfd.readouterr().err.replace("'", "")


def test_inspect_shows_a_checkpoint_and_lists_the_names_that_are_refused(own, capfd):
    assert main(["inspect", str(own), "--json"]) == ExitCode.UNSUPPORTED
    told = json.loads(capfd.readouterr().out)
    (problem,) = told["problems"]
    assert problem["kind"] == "UnsafePickleError"
    assert "mine.Progress at mine" in problem["message"]
    assert "--allow-global mine.Progress" in problem["hint"]
    assert told["step"] == 2
    assert told["tensors"] > 0 if isinstance(told["tensors"], int) else told["tensors"]
    assert main(["inspect", str(own), "--allow-global", "mine.Progress"]) == 0


def test_what_hides_in_the_archive_of_an_object_does_not_get_into_the_result(tmp_path):
    """With an entry `constants.pkl`, torch.load takes an archive for TorchScript and reads another pickle of it."""
    source = shutil.copytree(HERE / "dcp-2.13/fsdp2-flat" / STEP, tmp_path / "in")
    key = next(entry.key for entry in index_of(source).extra.carried if not entry.is_tensor)
    item = next(data for (name, _), data in items(source).items() if name == key)
    hiding = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(hiding, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr(f"{old.namelist()[0].partition('/')[0]}/constants.pkl", b"cos\nsystem\n(S'touch executed'\ntR.")
    with (source / "__0_0.distcp").open("ab") as stream:
        place = {"relative_path": "__0_0.distcp", "offset": stream.tell(), "length": len(hiding.getvalue())}
        stream.write(hiding.getvalue())
    edit_metadata(source, lambda state: stored(state, key).state.update(place))
    assert any(b"constants.pkl" in data for data in items(source).values())
    convert(Conversion(source=source, target=tmp_path / "out", topology=Topology(dp=2, zero=3)))
    found = items(tmp_path / "out")
    assert any(name == key for name, _ in found)
    assert not any(b"constants.pkl" in data for data in found.values())
