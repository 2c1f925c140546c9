"""`kubectl-etj` as one file: the same bytes in every build, and a start with an interpreter and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from krew import build
from tests.unit.elastic_operator.plugin.test_output import RECORDED, api, config

HERE = build.this_platform()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build.build(folder, [HERE], {HERE: build.installed_natives()}, "https://example.com/v1")
    return folder


def program(dist: Path) -> Path:
    return dist / f"kubectl-etj-{HERE.os}-{HERE.arch}"


def run(dist: Path, cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the file with an interpreter that sees the standard library only."""
    bare = getattr(sys, "_base_executable", sys.executable)
    variables = {"HOME": str(cache), "XDG_CACHE_HOME": str(cache), "PATH": "/usr/bin:/bin", **environment}
    command = [bare, "-I", "-S", "-W", "error", str(program(dist)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=120)


def test_the_file_runs_with_a_bare_interpreter(dist: Path, tmp_path: Path) -> None:
    done = run(dist, tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kubectl etj {build.read_version()}\n", "")
    (unpacked,) = (tmp_path / "kubectl-etj").iterdir()
    assert (tmp_path / "kubectl-etj").stat().st_mode & 0o077 == 0
    before = (unpacked / "lib").stat().st_mtime_ns
    done = run(dist, tmp_path, "--help")
    assert done.returncode == 0
    assert "usage: kubectl etj" in done.stdout
    assert (unpacked / "lib").stat().st_mtime_ns == before, "it is unpacked once"


def test_versions_that_were_not_started_for_months_are_removed_with_the_next_one(dist: Path, tmp_path: Path) -> None:
    cache = tmp_path / "kubectl-etj"
    for name, days in {"old-cpython-311": 100, "used-cpython-312": 10, "new-x": 100, "of-the-user": 100}.items():
        (cache / name / "lib").mkdir(parents=True, mode=0o700)
        (cache / name / "lib/module.py").touch()
        os.utime(cache / name, times=(time.time() - days * 86_400,) * 2)
    cache.chmod(0o700)
    assert run(dist, tmp_path, "--version").returncode == 0
    kept = {path.name for path in cache.iterdir()}
    assert len(kept) == 3
    assert {"used-cpython-312", "of-the-user"} < kept
    (own,) = kept - {"used-cpython-312", "of-the-user"}
    os.utime(cache / own, times=(0, 0))
    assert run(dist, tmp_path, "--version").returncode == 0
    assert (cache / own).stat().st_mtime > time.time() - 600, "a start counts as use"


def test_the_file_does_what_the_installed_program_does(dist: Path, tmp_path: Path) -> None:
    job = json.loads(json.dumps(RECORDED["drained"]["job"]))
    job["status"]["phase"] = "Complete"

    def answer(path: str) -> tuple[str, bytes]:
        body: dict[str, Any] = job if path.endswith("/gpt") else {"metadata": {}, "items": []}
        return "object", json.dumps(body).encode()

    with api(answer) as server:
        kubeconfig = str(config(tmp_path, server))
        page = run(dist, tmp_path, "report", "gpt", "-o", "html", "--kubeconfig", kubeconfig)
        colours = run(dist, tmp_path, "status", "gpt", "--color", "always", "--kubeconfig", kubeconfig)
        plan = run(dist, tmp_path, "plan", "gpt", "-o", "yaml", "--kubeconfig", kubeconfig)
    assert page.stdout.startswith("<!DOCTYPE html>")
    assert "\x1b[1mJob:\x1b[0m" in colours.stdout, "rich is inside"
    assert yaml.safe_load(plan.stdout)["outcome"] == "Finished"
    assert page.stderr + colours.stderr + plan.stderr == ""


def test_a_cache_that_others_may_write_is_not_used(dist: Path, tmp_path: Path) -> None:
    cache = tmp_path / "kubectl-etj"
    cache.mkdir()
    cache.chmod(0o777)
    done = run(dist, tmp_path, "--version", TMPDIR=str(tmp_path))
    assert done.returncode == 0
    assert list(cache.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["kubectl-etj"], "the temporary folder is removed"


def test_without_a_cache_the_file_runs_from_a_temporary_folder(dist: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = run(dist, tmp_path / "file", "--version", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_platform_is_refused_with_what_is_needed(dist: Path, tmp_path: Path) -> None:
    other = next(item for item in build.PLATFORMS if item != HERE)
    folder = tmp_path / "other"
    folder.mkdir()
    content = build.make_program({"native/cpython-311/x": b"", "native/cpython-312/x": b""}, other)
    (folder / program(dist).name).write_bytes(content)
    done = run(folder, tmp_path, "--version")
    needed = f"needs cpython-311 or cpython-312 on {other.system} {other.machine}, found {sys.implementation.cache_tag}"
    assert done.returncode == 1
    assert needed in done.stderr


def test_two_builds_have_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    build.build(tmp_path, [HERE], {HERE: build.installed_natives()}, "https://example.com/v1")
    names = sorted(path.name for path in dist.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if (dist / name).read_bytes() != (tmp_path / name).read_bytes()] == []


def test_the_manifest_names_the_archive_with_its_checksum(dist: Path) -> None:
    text = (dist / "etj.yaml").read_text()
    manifest = yaml.safe_load(text)
    assert "@" not in text
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("Plugin", "etj")
    assert manifest["spec"]["version"] == f"v{build.read_version()}"
    (entry,) = manifest["spec"]["platforms"]
    archive = dist / entry["uri"].rpartition("/")[2]
    assert entry["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert entry["selector"]["matchLabels"] == {"os": HERE.os, "arch": HERE.arch}
    with tarfile.open(archive) as packed:
        members = {item.name: item.mode for item in packed}
    assert members == {entry["bin"]: 0o755, "LICENSE": 0o644}


def test_the_licence_of_every_distribution_is_inside() -> None:
    assert {name.split("/")[1] for name in build.licences()} == set(build.DISTRIBUTIONS)


def test_nothing_compiled_is_in_the_pure_part() -> None:
    names = build.installed_files()
    assert not [name for name in names if re.search(r"\.(so|pyd|pyc)$|\.\.", name)]
    assert "lib/certifi/cacert.pem" in names
    assert sum(map(len, names.values())) < 12e6
