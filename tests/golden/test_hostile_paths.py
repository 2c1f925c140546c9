"""Paths that are none, and URLs of no store: an error of usage, whichever argument it is."""

from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.cli.main import main
from reshard.contract import ExitCode
from reshard.errors import UsageError
from reshard.topology import Topology
from tests.golden.command import ZERO2

SCHEMES = ["foo://bar", "FOO://bar", "S3://bucket/x", "reference://x", "zip://x", "dir://x", "simplecache://x"]


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("verb", ["inspect", "verify", "plan", "run", "explain"])
def test_a_url_of_no_store_is_an_error_of_usage(verb, text, tmp_path, capsys):
    more = {"run": [str(tmp_path / "x"), "--to", "dp=2"], "plan": ["--to", "dp=2"], "explain": ["x"]}.get(verb, [])
    assert main([verb, text, *more]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "Traceback" not in told and text.partition("/")[0] in told and "hint: " in told


BAD = ["\0", "a\0b", "s3://b\0c", "\ud800", "/\udfff"]


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("option", ["source", "target", "like", "names", "patterns", "report"])
def test_what_can_be_no_path_is_an_error_of_usage(option, text, tmp_path, capsys):
    words = ["run", str(ZERO2), str(tmp_path / "x"), "--to", "dp=2"]
    if option in ("source", "target"):
        words[("source", "target").index(option) + 1] = text
    else:
        words += [f"--{option}", text]
    assert main(words) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "Traceback" not in told and "is no path: it holds" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "\0"], ["verify", "\0"], ["verify", str(ZERO2), "\0"], ["explain", "\0", "x"],
        ["explain", str(ZERO2), "embed*", "--svg", "\0"],
    ],
)  # fmt: skip
def test_every_verb_refuses_it(words, capsys):
    assert main(words) == ExitCode.USAGE
    assert "is no path: it holds a zero byte" in capsys.readouterr().err


def test_the_library_refuses_it_too(tmp_path):
    with pytest.raises(UsageError, match="zero byte"):
        index_of(Path("\0"))
    for source, target in ((Path("\0"), tmp_path / "x"), (ZERO2, tmp_path / "\0")):
        with pytest.raises(UsageError, match="zero byte"):
            convert(Conversion(source=source, target=target, topology=Topology(dp=2)), RunOptions(num_threads=1))
