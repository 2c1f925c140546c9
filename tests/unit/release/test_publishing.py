"""Images of a release and how they get into a registry; builders, skopeo and helm are played and list their calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from release.build import CHECKSUMS, write_checksums
from release.images import IMAGES, PLATFORMS, LeftOut, build_images
from tests.pages import ROOT

DOCKER = """#!/bin/sh
echo "$*" >> "$CALLS"
case $1-$2 in
    version-*) echo 28 ;;
    buildx-inspect) echo 'Name: b'; echo 'Platforms: linux/amd64*, linux/amd64/v2, PLATFORMS' ;;
    buildx-build)
        for word in "$@"; do
            case $word in type=oci,dest=*) echo made > "${word#type=oci,dest=}" ;; esac
        done ;;
esac
"""
SKOPEO = """#!/bin/sh
echo "skopeo $*" >> "$CALLS"
echo "sha256:$(echo "$5" | sha256sum | cut -c1-64)" > "$5"
"""
HELM = """#!/bin/sh
echo "helm $*" >> "$CALLS"
echo "Pushed: $3/elastic-training-operator:1.2.3"
echo "Digest: sha256:aa"
"""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that are found before all others; `calls` lists how they were called."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("BUILDER", "VERSION", "REGISTRY", "BUILD_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def play(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def make_images(tmp_path: Path) -> list[LeftOut]:
    return build_images((ROOT, ROOT), tmp_path, uv=Path("/nowhere/uv"), revision="abc")


def test_a_builder_makes_one_archive_of_each_image_for_all_platforms(played: Path, tmp_path: Path) -> None:
    play(played, "docker", DOCKER.replace("PLATFORMS", "linux/arm64"))
    assert make_images(tmp_path) == []
    assert len(list(tmp_path.glob("*.oci.tar"))) == len(IMAGES)
    builds = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("buildx build")]
    assert len(builds) == len(IMAGES)
    assert all(f"--platform {','.join(PLATFORMS)} " in line and "REVISION=abc" in line for line in builds)


def test_a_platform_that_the_builder_cannot_build_is_left_out_with_the_reason(played: Path, tmp_path: Path) -> None:
    play(played, "docker", DOCKER.replace("PLATFORMS", "linux/386"))
    (left_out,) = make_images(tmp_path)
    assert left_out.what == "images for linux/arm64"
    assert left_out.reason == (
        "docker buildx builds for linux/amd64*, linux/amd64/v2, linux/386 here; register QEMU for more"
    )
    assert "--platform linux/amd64 " in (tmp_path / "calls").read_text()


def test_docker_without_a_builder_of_archives_is_told(played: Path, tmp_path: Path) -> None:
    play(played, "docker", "#!/bin/sh\n[ $1 = version ]\n")
    left_out = make_images(tmp_path)
    assert [item.what for item in left_out] == [f"images for {name}" for name in PLATFORMS]
    assert {item.reason for item in left_out} == {"docker has no buildx with a builder (docker buildx create --use)"}
    assert not list(tmp_path.glob("*.oci.tar"))


def publish(dist: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "release/publish.sh", dist]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    for name in (
        *(f"elastic-training-{image}-1.2.3.oci.tar" for image in IMAGES),
        "elastic-training-operator-1.2.3.tgz",
    ):
        (folder / name).write_text(name)
    write_checksums(folder)
    return folder


def test_images_and_chart_are_pushed_and_their_digests_told(played: Path, tmp_path: Path, dist: Path) -> None:
    play(played, "skopeo", SKOPEO)
    play(played, "helm", HELM)
    digests = tmp_path / "digests"
    done = publish(dist, REGISTRY="registry.example.com/team", DIGESTS=str(digests))
    assert done.returncode == 0, done.stderr
    told = dict(line.split("=") for line in digests.read_text().splitlines())
    assert set(told) == {*IMAGES, "chart"} and told["chart"] == "sha256:aa"
    for image in IMAGES:
        assert f"pushed registry.example.com/team/elastic-training-{image}@{told[image]}\n" in done.stdout
    calls = (tmp_path / "calls").read_text()
    source = f"oci-archive:{dist}/elastic-training-operator-1.2.3.oci.tar"
    assert f"{source} docker://registry.example.com/team/elastic-training-operator:1.2.3\n" in calls
    assert f"helm push {dist}/elastic-training-operator-1.2.3.tgz oci://registry.example.com/team/charts\n" in calls


def test_files_of_an_earlier_release_in_the_same_folder_are_not_pushed(
    played: Path, tmp_path: Path, dist: Path
) -> None:
    play(played, "skopeo", SKOPEO)
    play(played, "helm", HELM)
    for name in (
        *(f"elastic-training-{image}-1.2.9.oci.tar" for image in IMAGES),
        "elastic-training-operator-1.2.9.tgz",
    ):
        (dist / name).write_text("old")
    done = publish(dist, REGISTRY="r")
    assert (done.returncode, "1.2.9" in (tmp_path / "calls").read_text()) == (0, False), done.stderr
    (tmp_path / "calls").unlink()
    sums = (dist / CHECKSUMS).read_text().splitlines(keepends=True)
    (dist / CHECKSUMS).write_text("".join(line for line in sums if "elastic-training-reshard" not in line))
    done = publish(dist, REGISTRY="r")
    assert (done.returncode, "has no elastic-training-reshard-1.2.3.oci.tar" in done.stderr) == (1, True)
    assert not (tmp_path / "calls").exists()


def test_nothing_is_pushed_if_a_file_has_changed_or_an_image_is_missing(
    played: Path, tmp_path: Path, dist: Path
) -> None:
    play(played, "skopeo", SKOPEO)
    play(played, "helm", HELM)
    assert publish(dist).returncode == 2
    (dist / "elastic-training-reshard-1.2.3.oci.tar").unlink()
    write_checksums(dist)
    done = publish(dist, REGISTRY="r")
    assert (done.returncode, "has no elastic-training-reshard-1.2.3.oci.tar" in done.stderr) == (1, True)
    (dist / "elastic-training-operator-1.2.3.tgz").write_text("other")
    done = publish(dist, REGISTRY="r")
    assert done.returncode != 0 and "elastic-training-operator-1.2.3.tgz" in done.stdout + done.stderr
    assert not (tmp_path / "calls").exists()
    assert (dist / CHECKSUMS).exists()
