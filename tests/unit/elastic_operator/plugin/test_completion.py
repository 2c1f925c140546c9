"""`kubectl etj completion`: candidates are read from the parser, and shells take the scripts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_operator.plugin.completion import complete, find_candidates, make_script
from elastic_operator.plugin.main import main
from elastic_operator.plugin.options import SHELLS

NAMES = {"jobs": ["gpt", "llama"], "nodes": ["gpu-1", "gpu-2"]}


def names(kind: str) -> Sequence[str]:
    return NAMES[kind]


def no_names(kind: str) -> Sequence[str]:
    raise AssertionError(f"asked for {kind}")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sta|", ["status"]),
        ("-n demo re|", ["report", "resume", "retry"]),
        ("status |", ["gpt", "llama"]),
        ("status -o json g|", ["gpt"]),
        ("status gpt |", []),
        ("status gpt -o |", ["html", "json", "md", "text", "yaml"]),
        ("plan gpt --lose |", ["gpu-1", "gpu-2"]),
        ("plan gpt --lose gpu-1 gpu-|", ["gpu-1", "gpu-2"]),
        ("logs gpt --re|", ["--reshard"]),
        ("drain gpt --wa|", ["--wait"]),
        ("completion z|", ["zsh"]),
        ("explode |", []),
    ],
)
def test_a_word_is_completed_from_the_parser_and_the_cluster(line: str, expected: list[str]) -> None:
    assert find_candidates(line.removesuffix("|").split(" "), names) == expected


def test_the_cluster_is_asked_only_for_names() -> None:
    for words in (["st"], ["status", "--ev"], ["status", "gpt", "-o", ""], ["status", "gpt", ""]):
        find_candidates(words, no_names)


def test_without_a_cluster_there_are_no_names_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(["status", ""], {"HOME": str(tmp_path)}) == []
    assert main(["__complete", "stat"], {}) == 0
    assert capsys.readouterr().out == "status\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_its_script(shell: str) -> None:
    script = make_script(shell)
    program = {"kubectl": "sh"}.get(shell, shell)
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=20)


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    fake = tmp_path / "kubectl-etj"
    fake.write_text('#!/bin/sh\necho "$#:$*"\n')
    fake.chmod(0o755)
    typed = "COMP_WORDS=(kubectl-etj status g); COMP_CWORD=2"
    ask = f'{make_script("bash")}\n{typed}; _kubectl_etj; echo "${{COMPREPLY[@]}}"'
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, env=environment, timeout=20)
    assert done.stdout == "3:__complete status g\n"
