"""How stacks are told apart, and which of their files are of single ranks."""

from pathlib import Path

import pytest

from reshard.folders import find_training_folder
from reshard.folders.stacks import STACKS, stack_of

MODEL = "mp_rank_00_model_states.pt"


def make(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_each_stack_has_a_name_of_its_own_and_one_way_to_be_told() -> None:
    assert [stack_of(stack.name) for stack in STACKS] == list(STACKS)
    assert all((stack.tag is None) is bool(stack.parts) for stack in STACKS)


@pytest.mark.parametrize(
    ("files", "name", "parts"),
    [
        (
            {"latest": "global_step5\n", f"global_step5/{MODEL}": "", "trainer_state.json": "{}"},
            "Hugging Face's Trainer",
            ("global_step5",),
        ),
        ({"latest": "pytorch_model", f"pytorch_model/{MODEL}": ""}, "Accelerate", ("pytorch_model",)),
        ({"latest": "checkpoint", f"checkpoint/{MODEL}": ""}, "Lightning", ("checkpoint",)),
        (
            {"pytorch_model_fsdp_0/.metadata": "", "optimizer_0/.metadata": ""},
            "Accelerate's FSDP",
            ("pytorch_model_fsdp_0", "optimizer_0"),
        ),
        ({"pytorch_model_fsdp_0/.metadata": ""}, "Accelerate's FSDP", ("pytorch_model_fsdp_0",)),
    ],
)
def test_a_folder_is_told_by_its_names(tmp_path: Path, files: dict[str, str], name: str, parts: tuple[str]) -> None:
    found = find_training_folder(make(tmp_path, files))
    assert found is not None
    assert (found[0].name, found[1]) == (name, parts)


@pytest.mark.parametrize(
    "files",
    [
        {"latest": "global_step5", f"global_step5/{MODEL}": ""},  # plain DeepSpeed
        {"latest": "global_step5", "global_step5/x": "", "trainer_state.json": "{}"},
        {"latest": "global_step6", f"global_step5/{MODEL}": "", "trainer_state.json": "{}"},
        {"latest": "checkpoint", f"checkpoint/{MODEL}": "", f"other/{MODEL}": ""},
        {"optimizer_0/.metadata": ""},
        {"pytorch_model_fsdp_0/.metadata": "", "pytorch_model_fsdp_1/.metadata": ""},
        {"pytorch_model_fsdp_0/x": "", "optimizer_0/.metadata": ""},
        {"trainer_state.json": "{}"},
        {},
    ],
)
def test_other_folders_are_none(tmp_path: Path, files: dict[str, str]) -> None:
    assert find_training_folder(make(tmp_path, files)) is None


def test_rank_files_are_those_that_the_frameworks_name_by_rank() -> None:
    trainer, accelerate = stack_of("Hugging Face's Trainer"), stack_of("Accelerate")
    assert trainer.rank_file is not None and accelerate.rank_file is not None
    assert all(trainer.rank_file.fullmatch(name) for name in ("rng_state.pth", "rng_state_0.pth", "rng_state_12.pth"))
    assert not any(trainer.rank_file.fullmatch(name) for name in ("rng_state_x.pth", "a/rng_state_0.pth"))
    assert accelerate.rank_file.fullmatch("random_states_3.pkl")
