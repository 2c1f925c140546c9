"""Messages between operator, reshard pod and trainer."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import errors
from reshard.contract import (
    COMMIT_FOLDER,
    COMMIT_NAME,
    TERMINATION_MESSAGE_LIMIT_BYTES,
    CommitRef,
    ExitCode,
    ReshardReport,
    sentence,
)

REF = CommitRef(uri="/c/a1/step-00000020", step=20, samples=640, attempt=1, topology={"tp": 2, "dp": 3}, num_bytes=7)


def test_a_commit_ref_survives_the_lease() -> None:
    assert CommitRef.from_json(REF.to_json()) == REF


def test_a_reader_ignores_fields_of_a_newer_writer() -> None:
    assert CommitRef.from_json(REF.to_json()[:-1] + ',"colour":"blue"}') == REF


@pytest.mark.parametrize(
    ("name", "is_commit"),
    [
        ("a1/step-00000020", True),
        ("a999999999/step-start-5a1dbeef.2", True),
        ("a1/step-" + "0" * 64, True),
        ("a1/step-" + "0" * 65, False),
        ("a1/step-", False),
        ("a/step-1", False),
        ("a1234567890/step-1", False),
        ("a1/step-1/..", False),
        ("a1/step-1\n", False),
        ("a\u0661/step-1", False),
        ("x/a1/step-1", False),
    ],
)
def test_the_name_of_a_commit_has_one_form(name: str, is_commit: bool) -> None:
    assert bool(COMMIT_NAME.fullmatch(name)) == is_commit
    attempt, _, folder = name.partition("/")
    if attempt == "a1":
        assert bool(COMMIT_FOLDER.fullmatch(folder)) == is_commit


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"uri": "/c"}'])
def test_a_damaged_commit_ref_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        CommitRef.from_json(text)


@given(st.text(max_size=9000))
def test_a_report_always_fits_the_termination_message(message: str) -> None:
    report = ReshardReport(ok=False, exit_code=ExitCode.STORAGE_FULL, message=message, source="/c/a1", target="/c/a2")
    wire = report.to_json()
    assert len(wire.encode()) <= TERMINATION_MESSAGE_LIMIT_BYTES
    read = ReshardReport.from_json(wire)
    assert read.exit_code == ExitCode.STORAGE_FULL
    assert message.startswith(read.message)


def test_every_error_class_has_an_exit_code_and_failures_never_look_like_success() -> None:
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)]
    assert len(classes) > 10
    assert all(item.exit_code in set(ExitCode) - {ExitCode.OK} for item in classes)


def test_an_error_prints_path_problems_and_hint() -> None:
    error = errors.CorruptSourceError("2 files are damaged", path="/c/a1", problems=["x", "y"], hint="use another")
    assert str(error) == "/c/a1: 2 files are damaged\n  - x\n  - y\nhint: use another"


def test_an_error_in_one_line_keeps_its_hint_apart() -> None:
    error = errors.CorruptSourceError("is damaged", path="/c/a1", hint="use another")
    assert sentence(str(error)) == "/c/a1: is damaged; hint: use another"


def test_the_contract_needs_only_the_standard_library() -> None:
    program = (
        "import sys, reshard.contract, reshard.topology, reshard.errors, reshard.commits.commit\n"
        "heavy = {'numpy', 'torch', 'deepspeed', 'kopf', 'aiohttp', 'kubernetes'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
