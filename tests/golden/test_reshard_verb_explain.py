"""`reshard explain` on real checkpoints: every box where it says, and pictures."""

from pathlib import Path

import numpy as np

from reshard import api
from reshard.cli.explain import explain
from reshard.contract import ExitCode
from tests.golden.command import EVERY, PIPELINE, Answer
from tests.golden.files import assemble


def test_explained_bytes_are_the_tensors(say: Answer) -> None:
    """Read each box from where `explain` says that it lies; together they are the tensor."""
    wanted = assemble(api.index_of(PIPELINE))
    for found in say.json("explain", PIPELINE, "fp32/*", "--to", "dp=3")["tensors"]:
        whole = np.zeros(found["shape"], dtype=np.uint32)
        for box in (box for box in found["boxes"] if box["used"]):
            flat = np.frombuffer((PIPELINE / box["file"]).read_bytes()[box["start"] : box["stop"]], dtype=np.uint32)
            view = np.lib.stride_tricks.as_strided(flat, box["size"], [4 * stride for stride in box["strides"]])
            low = box["offset"]
            whole[tuple(slice(a, a + size) for a, size in zip(low, box["size"], strict=True))] = view
        assert (whole == wanted[f"fp32/{found['name']}"].view(np.uint32)).all()


def test_a_picture_is_written_and_too_large_ones_are_refused(tmp_path: Path, say: Answer) -> None:
    picture = tmp_path / "boxes.svg"
    say("explain", PIPELINE, "2.qkv", "--to", "dp=3", "--svg", picture)
    assert picture.read_text(encoding="utf-8").startswith("<svg ")
    assert "at most 12" in say("explain", PIPELINE, "*", "--svg", picture, code=ExitCode.USAGE)
    words = ["explain", PIPELINE, "2.qkv", "--svg", tmp_path / "no/such/folder.svg"]
    assert "cannot be written" in say(*words, code=ExitCode.TARGET_FAILED)


def test_a_name_that_is_not_there(say: Answer) -> None:
    text = say("explain", PIPELINE, "2.qvk", code=ExitCode.USAGE)
    assert "there is for instance 2.qkv" in text


def test_every_golden_checkpoint_can_be_explained() -> None:
    for path in EVERY:
        index = api.index_of(path)
        found = explain(index, range(len(index.tensors)))
        assert sum(len(item.places) for item in found) == len(index.shards.boxes())
