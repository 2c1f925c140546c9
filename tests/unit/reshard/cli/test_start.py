"""Imports at the start of a command, which takes longer than a conversion of a small checkpoint."""

import subprocess
import sys

CODE = """
import sys
import numpy
before = set(sys.modules)
import reshard.cli.command_line
print(*(set(sys.modules) - before))
"""
NEEDED_BY_SOME = {
    "reshard.execution.compare", "reshard.cli.estimate", "reshard.cli.explain", "reshard.cli.preflight",
    "reshard.cli.inspection", "reshard.names",
    "reshard.cli.svg", "reshard.execution.rounded_digests", "reshard.virtual.conversion",
    "reshard.formats.universal", "reshard.formats.dcp",
    "reshard.formats.megatron", "reshard.formats.safetensors", "yaml", "fsspec", "torch",
    "difflib", "email", "html", "importlib.metadata", "tempfile",
}  # fmt: skip


def test_what_only_some_verbs_need_is_not_imported_by_all() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "reshard.api" in found
    assert not found & NEEDED_BY_SOME
