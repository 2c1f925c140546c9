"""YAML files cost no more than they are long, and nothing that is no file is waited for."""

import os
import subprocess
import sys

import pytest

from reshard.api import Conversion
from reshard.errors import UsageError
from reshard.formats.deepspeed.tensor_parallel import pattern_file
from reshard.names.parse import load
from reshard.storage import yaml_file
from reshard.storage.yaml_file import read_yaml
from reshard.topology import Topology
from tests.fuzz.guard import outcome_of

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)


@pytest.mark.parametrize("read", [read_yaml, load, pattern_file.load])
def test_an_alias_is_refused_before_anything_is_built_of_it(read, tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB)
    assert len(BOMB) < 1300
    error = outcome_of(lambda: read(path))
    assert isinstance(error, UsageError)
    assert str(error) == f"{path}: is no YAML: *a is an alias in line 2, column 8"


@pytest.mark.parametrize("read", [read_yaml, load, pattern_file.load])
@pytest.mark.parametrize("what", ["a pipe", "/dev/zero", "a folder", "a link to a pipe", "a zero byte", "too long"])
def test_what_is_no_small_file_is_refused_at_once(what, read, tmp_path):
    path = tmp_path / "f.yaml"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif what == "a folder":
        path.mkdir()
    elif what == "a link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    elif what == "a zero byte":
        path = tmp_path / "\0"
    else:
        with open(path, "wb") as stream:
            stream.truncate(1 << 40)
    assert isinstance(outcome_of(lambda: read(path)), UsageError)


def test_a_pipe_of_a_shell_is_refused_and_what_to_do_is_said(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"<\(\.\.\.\), is a pipe: write it to a file"):
        read_yaml(tmp_path / "pipe")


@pytest.mark.parametrize("option", ["--names", "--patterns"])
def test_the_command_waits_for_no_pipe_before_it_looks_at_the_source(option, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    named = {option.removeprefix("--"): tmp_path / "pipe"}
    wanted = Conversion(source=tmp_path, target=tmp_path / "x", topology=Topology(), **named)
    with pytest.raises(UsageError, match="is a pipe or device"):
        dict(wanted.options)
    command = [
        sys.executable,
        "-m",
        "reshard.cli.main",
        "run",
        tmp_path,
        tmp_path / "x",
        "--to",
        "dp=1",
        option,
        tmp_path / "pipe",
    ]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode in (2, 11)


def test_a_link_to_a_file_is_followed(tmp_path):
    """Kubernetes mounts ConfigMaps so."""
    (tmp_path / "data").write_text("a: 1")
    (tmp_path / "link").symlink_to("data")
    assert read_yaml(tmp_path / "link") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\na: 2", "key 'a' is there twice in line 2, column 1"), ("? [a]\n: b", "unhashable"),
        ("[" * 5000, "maximum recursion|nested"), ("a: " + ":".join(["59"] * 300_000), "a number of 899999 characters"),
        ("a: " + "9" * 500_000, "a number of 500000 characters"), ("a: \0", "special characters"),
        ("!!python/tuple [a]", "tag"),
        ("a: 2000-99-99", "month|day"), ("a: !!bool foo", "is no YAML: .*foo"), ('a: !!int ""', "is no YAML: .*index"),
        ('a: !!float ""', "is no YAML: .*index"),
        ("a: " + ":".join(["59"] * 300) + ":59.0", "a number of 904 characters"),
        ("a: 1." + "0" * 100, "a number of 102 characters"), ("a: !!timestamp foo", "is no YAML"),
        ("a: !!binary é", "is no YAML|base64"), ("? 1:1:1:1:1:1:1:1:1:1.0\n: 1\n? !!float _\n: 1", "is no YAML"),
    ],
)  # fmt: skip
def test_what_is_no_plain_yaml_is_refused_in_one_line(text, why, tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    error = outcome_of(lambda: read_yaml(path))
    assert isinstance(error, UsageError)
    with pytest.raises(UsageError, match=why):
        raise error
    assert "\n" not in error.message and len(error.message) < 500


@pytest.mark.parametrize("text", ["0.5", "-1.7976931348623157e+308", ".inf", "1:30.5", "6.0221409e+23"])
def test_a_fraction_is_read(text, tmp_path):
    (tmp_path / "f.yaml").write_text(f"a: {text}")
    assert isinstance(read_yaml(tmp_path / "f.yaml")["a"], float)


def test_many_keys_are_compared_in_proportion_to_their_number(tmp_path, monkeypatch):
    """Each against all before it would be a billion comparisons for a file of half a megabyte."""

    class Key(str):
        __slots__ = ()
        compared = 0

        def __eq__(self, other: object) -> bool:
            Key.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    (tmp_path / "f.yaml").write_text("{" + ", ".join(f"k{at}: 1" for at in range(2_000)) + "}")
    loader = yaml_file._loader()
    loader.add_constructor("tag:yaml.org,2002:str", lambda self, node: Key(node.value))
    monkeypatch.setattr(yaml_file, "_loader", lambda: loader)
    assert len(read_yaml(tmp_path / "f.yaml")) == 2_000
    assert Key.compared < 20_000
