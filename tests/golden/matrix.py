"""Every golden checkpoint into every format and layout: `python -m tests.golden.matrix` writes the page's table again.

A cell of the matrix is one conversion, read back, compared with its source tensor by tensor, and converted back. It
ends in one of three ways: both ways, one way (why the way back is refused), or refused (why).
"""

import dataclasses
import functools
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.api import Conversion, RunOptions, convert, index_of, view_of
from reshard.commits.commit import read_commit
from reshard.errors import UnsupportedError
from reshard.execution import compare
from reshard.execution.rounded_digests import rounded_digests
from reshard.execution.verify import read_digests
from reshard.tensors.cast import FLOATS
from reshard.tensors.layout import PADDING, Index
from reshard.topology import Topology

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "conversions.md"
BEGIN, END = "<!-- the matrix: python -m tests.golden.matrix -->", "<!-- end of the matrix -->"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A row.

    Attributes:
        path: the checkpoint.
        like: what `--like` names where the target is of one of DeepSpeed's formats.
        described: `--model` and `--ds-config` name a description of the model and a configuration, where the target is
            of one of DeepSpeed's formats.
        states: what `--states` names.
    """

    path: Path
    like: Path | None = None
    described: bool = False
    states: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A column."""

    format: str
    topology: str = "dp=1"
    dtype: str | None = None

    @property
    def title(self) -> str:
        """Head of the column."""
        words = [self.format, self.topology if self.topology != "dp=1" else "", self.dtype or ""]
        return " ".join(filter(None, words))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Result of a conversion.

    Attributes:
        refused: why, or empty.
        back: why the way back is refused, or empty.
        compared: how many tensors were found equal.
        same_back: how many tensors came back as they were.
    """

    refused: str = ""
    back: str = ""
    compared: int = 0
    same_back: int = 0


_DESCRIBED = (
    "dcp/fsdp2-flat",
    "dcp/accelerate-fsdp2",
    "dcp/megatron-fsdp",
    "deepspeed/elastic-dp2",
    "universal/zero2-dp3",
    "safetensors/llama",
    "pytorch/single",
)


def _sources() -> dict[str, Source]:
    found = {}
    for family in ("deepspeed-0.19.8", "universal-0.19.8", "dcp-2.13"):
        for path in sorted((HERE / family).iterdir()):
            if path.is_dir():
                found[f"{family.partition('-')[0]}/{path.name}"] = Source(path=path / "step-00000002")
    found["dcp/accelerate-fsdp2"] = Source(path=HERE / "accelerate-1.15" / "fsdp2")
    found["dcp/megatron-fsdp"] = Source(path=HERE / "megatron-0.16.1" / "fsdp-dtensor-dp2" / "iter_0000002")
    # Its master weights are not equal to its weights, on purpose; formats that have one of both would differ.
    megatron = Source(path=HERE / "megatron-0.16.1" / "iter_0000003", states=("fp32", "exp_avg"))
    found["megatron/tp2 `--states` fp32,exp_avg"] = megatron
    found["megatron/tp2 `--states` weight"] = dataclasses.replace(megatron, states=("weight",))
    for name in ("buckets-experts", "buckets-tp2"):
        found[f"megatron/{name}"] = Source(path=HERE / "megatron-0.16.1" / name / "iter_0000003")
    for path in sorted((HERE / "safetensors").iterdir()):
        if path.is_dir() and any(path.glob("*.safetensors")):
            found[f"safetensors/{path.name}"] = Source(path=path)
    found |= {f"pytorch/{name}": Source(path=HERE / "pytorch-2.13" / name) for name in ("sharded", "single")}
    zero2, elastic = found["deepspeed/zero2-dp3"].path, found["deepspeed/elastic-dp2"]
    found["deepspeed/elastic-dp2 `--like` deepspeed/zero2-dp3"] = dataclasses.replace(elastic, like=zero2)
    for name in [name for name in found if name.startswith("universal/")]:
        native = name.replace("universal/", "deepspeed/")
        found[f"{name} `--like` {native}"] = dataclasses.replace(found[name], like=found[native].path)
    # Checkpoints of other models than the one that --like names.
    for name in ("dcp/fsdp2-flat", "megatron/tp2 `--states` weight", "safetensors/llama"):
        found[f"{name} `--like` deepspeed/zero2-dp3"] = dataclasses.replace(found[name], like=zero2)
    for name in _DESCRIBED:
        found[f"{name} `--model`"] = dataclasses.replace(found[name], described=True)
    return found


SOURCES = _sources()
_DEEPSPEEDS = ("deepspeed", "universal")
_NATIVE = ("dp=3,zero=0", "dp=3,zero=1", "dp=3,zero=2", "dp=3,zero=3", "tp=2,zero=1", "pp=2,dp=2", "tp=2,pp=2")
TARGETS = (
    *(Target(format="deepspeed", topology=topology) for topology in (*_NATIVE, "dp=4,ep=2")),
    *(Target(format="universal", topology=topology) for topology in ("zero=1", "zero=3", "tp=2")),
    Target(format="dcp", topology="dp=3"),
    Target(format="safetensors"),
    Target(format="safetensors", dtype="bfloat16"),
    Target(format="megatron"),
)


def describe(index: Index) -> dict[str, Any]:
    """Describe the model of a checkpoint as a user would who knows the script that saved it."""
    shapes = {tensor.key.name: list(tensor.shape) for tensor in index.tensors if tensor.key.state in ("weight", "fp32")}
    names = [name for name in shapes if name not in index.aliases and not name.endswith(PADDING)]
    floats = {tensor.key.name for tensor in index.tensors if tensor.dtype in FLOATS}
    groups = [list(group.names) for group in index.groups] or [[name for name in names if name in floats]]
    trained = {name for group in groups for name in group}
    # Both names of a tied weight are in a DCP checkpoint, whose state dict says nothing of ties.
    shared = {"head.weight": "embed.weight"} if "head.weight" in shapes and "head.weight" not in trained else {}
    return {
        "version": 1,
        "parameters": {name: shapes[name] for group in groups for name in group},
        "buffers": {name: shapes[name] for name in names if name not in trained and name not in shared},
        "shared": {**index.aliases, **shared},
        "groups": [{"parameters": group} for group in groups],
    }


def described_options(index: Index, topology: Topology, folder: Path) -> dict[str, Path]:
    """Write a model description and a configuration; return the options of `Conversion` that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    adam = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
    config = {"zero_optimization": {"stage": topology.zero}, "optimizer": adam}
    files = {"model": describe(index), "ds_config": config}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return {name: folder / f"{name}.json" for name in files}


@functools.cache
def source_of(name: str) -> tuple[Index, Mapping[str, str]]:
    """A golden checkpoint and the digests of its tensors."""
    index = view_of(index_of(SOURCES[name].path), states=SOURCES[name].states)
    return index, read_digests(index)


def result_of(path: Path) -> tuple[Index, Mapping[str, str]]:
    """A conversion and the digests of its tensors, which are those that were read back."""
    return index_of(path), read_commit(path).digests


@functools.cache
def cell(name: str, target: Target) -> Cell:
    """One conversion of one source."""
    with tempfile.TemporaryDirectory() as scratch:
        return _cell(name, target, Path(scratch))


def _cell(name: str, target: Target, folder: Path) -> Cell:
    source = SOURCES[name]
    plain = re.split(" `--(like|model)`", name)[0]
    if plain != name and target.format not in _DEEPSPEEDS:
        return cell(plain, target)
    wanted = Conversion(
        source=source.path,
        target=folder / "there",
        topology=Topology.parse(target.topology),
        target_format=target.format,
        weight_dtype=target.dtype,
        like=source.like,
        states=source.states,
        **(described_options(source_of(name)[0], Topology.parse(target.topology), folder) if source.described else {}),
    )
    try:
        convert(wanted, RunOptions(reread=True, sync=False, num_threads=1))
    except UnsupportedError as error:
        return Cell(refused=said(error))
    index, there = source_of(name), result_of(wanted.target)
    compared = agreeing(index, there)
    own = index[0]
    wanted = Conversion(
        source=wanted.target,
        target=folder / "back",
        topology=own.topology,
        target_format=own.format,
        like=None if own.format in (target.format, "safetensors") else source.path,
    )
    try:
        convert(wanted, RunOptions(reread=True, sync=False, num_threads=1))
    except UnsupportedError as error:
        return Cell(back=said(error), compared=compared)
    return Cell(compared=compared, same_back=agreeing(index, result_of(wanted.target)))


def agreeing(first: tuple[Index, Mapping[str, str]], second: tuple[Index, Mapping[str, str]]) -> int:
    """Count the tensors that both hold, all of which must be equal (weights of other types: when rounded)."""
    sides = compare.make_side(*first), compare.make_side(*second)
    rounded = [
        rounded_digests(index, keys)
        for (index, _), keys in zip((first, second), compare.find_types_to_round(*sides), strict=True)
    ]
    found = compare.compare_sides(
        *(dataclasses.replace(own, rounded=new) for own, new in zip(sides, rounded, strict=True))
    )
    assert not found.different, found.different
    return len(found.same)


def said(error: UnsupportedError) -> str:
    """A refusal in one line, without the paths and degrees by which the same refusal differs from cell to cell."""
    text = "; ".join([error.message, *error.problems[:1]]) + (f" (hint: {error.hint})" if error.hint else "")
    text = re.sub(r"tp=\d+,pp=\d+,dp=\d+(,ep=\d+)?,zero=\d", "TOPOLOGY", text)
    more = f" and {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
    return re.sub(r"\S*/(?=step-|there|back)", "", text.replace("\n", " ")).replace(str(HERE), "") + more


def render() -> str:
    """The table and the refusals, as the page has them."""
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(text, len(numbers) + 1)

    lines = ["| from | " + " | ".join(target.title for target in TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    for name in SOURCES:
        words = []
        for end in (cell(name, target) for target in TARGETS):
            if end.refused:
                words.append(f"no {number(end.refused)}")
            else:
                words.append(f"one way {number(end.back)}" if end.back else "yes")
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    return "\n".join([*lines, "", *(f"{at}. {text}" for text, at in numbers.items())]) + "\n"


def on_page() -> str:
    """Return the table that the page has now."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[2].partition(END)[0].strip() + "\n"


def main() -> None:
    """Write the table of the page again."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{render()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
