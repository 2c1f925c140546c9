"""Invalid command lines are refused before any file is read."""

from pathlib import Path

import pytest

from reshard.cli.arguments import check
from reshard.cli.main import main
from reshard.cli.options import parse
from reshard.contract import ExitCode
from reshard.errors import UsageError

NONSENSE = [
    (["--format", "nonsense"], "expected one of universal, deepspeed, dcp"),
    (["--to", "dp=2", "--dtype", "bf16"], "expected one of float64, float32, float16, bfloat16"),
    (["--to", "dp=2", "--states", "fp32/embed"], "names of states"),
    (["--to", "dp=2", "--states", "fp32,,weight"], "names of states"),
    (["--to", "xx=3"], "there is no degree 'xx' .*tp, pp, dp, ep, cp, zero"),
    (["--to", "dp=two"], "cannot read 'dp=two'"),
    (["--to", "dp=0"], "at least 1"),
    (["--to", ""], "names no degree"),
    (["--to", "dp=2", "--file-size", "3MB"], "KiB, MiB, GiB or TiB"),
]
OF_RESOURCES = [
    (["--to", "dp=2", "--memory", "abc"], "cannot read 'abc'"),
    (["--to", "dp=2", "--memory", "10"], "at least 1.0 MiB"),
    (["--to", "dp=2", "--memory", "99999999999TiB"], "at most 1024.00 TiB"),
    (["--to", "dp=2", "--threads", "-1"], "expected 1 to 256"),
    ([], "say what the target shall be"),
]
OF_RUN = [
    (["--to", "dp=2", "--limit-rate", "0"], "more than nothing"),
    (["--to", "dp=2", "--worker", "2/2"], "write the worker's number"),
    (["--to", "dp=2", "--worker", "0/999999999999"], "at most 1048576 workers"),
    (["--to", "dp=2", "--attempt", "-1"], "0 or more"),
    *(
        (["--to", "dp=2", "--mode", "virtual", *words], f"{words[0]}: --mode virtual moves no bytes")
        for words in (["--resume"], ["--reread"], ["--worker", "0/2"], ["--limit-rate", "1MiB"], ["--no-sync"])
    ),
]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        *((["run", "/nowhere", "/dev/null/out"], *row) for row in (*NONSENSE, *OF_RESOURCES, *OF_RUN)),
        *((["plan", "/nowhere"], *row) for row in (*NONSENSE, *OF_RESOURCES)),
        *((["explain", "/nowhere", "weight/*"], *row) for row in NONSENSE),
        (["verify", "/nowhere"], ["--states", "fp32/a"], "names of states"),
        (["verify", "/nowhere", ""], [], "B is an empty string"),
        (["inspect", ""], [], "the path is an empty string"),
        (["run", "", "out"], ["--to", "dp=2"], "the source is an empty string"),
        (["run", "/nowhere", ""], ["--to", "dp=2"], "the target is an empty string"),
        (["plan", "/nowhere", "s3://bucket/out"], ["--to", "dp=2"], "object stores are read, not written"),
        (["explain", "/nowhere", "weight/*"], ["--like", "/nowhere"], "--like: without a target"),
        (["explain", "/nowhere", "weight/*"], ["--dtype", "float16"], "--dtype: without a target"),
    ],
)
def test_nonsense_is_refused_before_a_file_is_looked_at(command: list[str], words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(parse([*command, *words]))


@pytest.mark.parametrize("words", [words for words, _ in NONSENSE])
def test_it_ends_with_the_exit_code_of_usage_whatever_else_is_wrong(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tmp_path / "nowhere"), "/dev/null/out", *words]) == ExitCode.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["run", "a", "b", "--to", "tp=2, dp=3", "--memory", "1MiB", "--states", "weight, fp32", "--worker", "0/4"],
        ["run", "a", "b", "--format", "megatron"],
        ["plan", "a", "--format", "safetensors", "--dtype", "float16", "--file-size", "1TiB"],
        ["explain", "a", "*", "--states", "weight"],
        ["verify", "a", "b"],
        ["inspect", "a"],
    ],
)
def test_sense_is_not_refused(words: list[str]) -> None:
    check(parse(words))
