"""Names from files cannot fake or control the program's output on a terminal: others choose them.

A name may hold line breaks, which fake a line of the program; control characters, which a terminal obeys; marks that
reverse the direction of text, which fool the reader's eye.
"""

import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest

from reshard.cli import command_line, output
from reshard.cli.main import main
from reshard.cli.output import printable
from reshard.cli.progress import ProgressLine
from reshard.contract import ExitCode
from reshard.errors import CorruptSourceError
from tests.golden.command import ZERO2, Answer

FAKE = "reshard: verified, nothing is wrong"
NAME = f"a\n{FAKE}\r\x1b]52;c;AA\x07\x7f\x85\x9b\t\v\f\u2028\u2029\u202e\u2066\u200f\u061c\ud800 é 語 ok"
TOLD = (
    f"a\\x0a{FAKE}\\x0d\\x1b]52;c;AA\\x07\\x7f\\x85\\x9b\\x09\\x0b\\x0c"
    r"\u2028\u2029\u202e\u2066\u200f\u061c\ud800 é 語 ok"
)


def checked(text: str) -> str:
    """The text, of which nothing but the line breaks of the program itself commands a terminal."""
    assert all(letter == "\n" or letter.isprintable() for letter in text)
    assert FAKE not in text.split("\n")
    return text


def safetensors(folder: Path, name: str) -> Path:
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder


def test_every_character_is_either_printable_or_escaped() -> None:
    for code in range(sys.maxunicode + 1):
        kind = unicodedata.category(chr(code))
        told = printable(chr(code))
        assert told.isprintable() and (told == chr(code)) is (kind[0] not in "CZ" or code == 0x20), hex(code)
    assert printable(NAME) == TOLD
    assert printable("\udcff\U000e0041") == r"\xff\U000e0041"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "{}", "--tensors"], ["plan", "{}", "--format", "dcp", "--no-measure"], ["explain", "{}", "a*"],
        ["explain", "{}", "zzz"], ["verify", "{}"], ["verify", "{}", "{}"], ["run", "{}", "{}.out", "--format", "dcp"],
        ["run", "{}", "{}.out", "--to", "tp=2"], ["inspect", "{}/absent"], ["inspect", "{}", "{}"],
    ],
)  # fmt: skip
def test_no_verb_says_a_line_of_its_own_that_is_a_name_of_the_checkpoint(
    words: list[str], tmp_path: Path, capsys
) -> None:
    name = NAME.replace("\ud800", "")
    folder = safetensors(tmp_path / name, name)
    main([word.format(folder) for word in words])
    told = capsys.readouterr()
    assert checked(told.out) + checked(told.err)
    assert "\\x0areshard: verified" in told.out + told.err or "\\nreshard: verified" in told.err


def test_problems_hints_and_files_are_escaped(tmp_path: Path, say: Answer) -> None:
    folder = safetensors(tmp_path / "s", "x")
    (folder / f"model-00001-of-00002\n{FAKE}\x1b.safetensors").write_bytes(b"")
    checked(say("verify", folder, code=ExitCode.SOURCE_INVALID))
    checked(say("inspect", folder, code=ExitCode.SOURCE_INVALID))


def test_json_is_json_whatever_the_names_are(tmp_path: Path, say: Answer, capsys) -> None:
    name = NAME.replace("\ud800", "")
    folder = safetensors(tmp_path / "s", name)
    assert say.json("inspect", folder)["tensors"][0]["name"] == name
    assert main(["inspect", str(folder), "--json"]) == 0
    assert checked(capsys.readouterr().out).isascii()
    say.json("explain", folder, NAME + "x", code=ExitCode.USAGE)


def test_an_error_that_nobody_foresaw_is_told_in_lines_of_the_program(tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(_options: object) -> None:
        try:
            raise KeyError(NAME)
        except KeyError as error:
            raise ValueError(NAME) from error

    monkeypatch.setitem(command_line.VERBS, "inspect", fail)
    assert main(["inspect", str(tmp_path)]) == ExitCode.INTERNAL
    told = checked(capsys.readouterr().err).split("\n")
    assert f"ValueError: {TOLD}" in told and f"reshard: a bug: ValueError: {TOLD}" in told
    assert any(line.startswith("KeyError: ") for line in told) and any("in fail" in line for line in told)


def test_notes_of_an_error_and_progress_are_lines(capsys, monkeypatch) -> None:
    def fail(_options: object) -> None:
        error = CorruptSourceError(NAME, path=NAME, hint=NAME, problems=[NAME])
        error.add_note(NAME)
        raise error

    monkeypatch.setitem(command_line.VERBS, "inspect", fail)
    assert main(["inspect", "x"]) == ExitCode.SOURCE_INVALID
    assert checked(capsys.readouterr().err).count(TOLD) == 5
    line = ProgressLine(10, every_seconds=0.0)
    monkeypatch.setattr(line, "text", lambda _now: NAME)
    line(5)
    assert checked(capsys.readouterr().err) == f"reshard: {TOLD}\n"


def test_one_function_writes_to_the_terminal() -> None:
    """Whatever else wrote there would have to escape, too."""
    root = Path(output.__file__).parents[1]
    allowed = {"output.py", "extras.py"}  # a name of a package, before anything else could be imported
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert path.name in allowed or not re.search(r"std(out|err)\.write|\bprint\(", text), path


def test_a_picture_holds_no_control_characters(tmp_path: Path, say: Answer) -> None:
    from xml.etree import ElementTree

    folder = safetensors(tmp_path / "s", NAME.replace("\ud800", ""))
    say("explain", folder, "a*", "--svg", tmp_path / "x.svg")
    ElementTree.fromstring((tmp_path / "x.svg").read_text())


def test_ordinary_text_is_as_it_was(say: Answer) -> None:
    assert "zero2-dp3" in say("inspect", ZERO2)
