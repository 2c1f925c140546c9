"""The files of a release depend on the commit alone; uv is played here, `make release` has the real one, twice."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from krew.build import this_platform
from release import build
from release.archive import list_chart_files, pack_chart
from release.build import CHART, CHECKSUMS, IMAGES, ReleaseError, build_release, find_differences, read_version
from release.chart_layout import pack_layout
from release.pins import Pin, PinError, read_pins, read_versions
from release.sbom import make_sbom
from tests.pages import ROOT

LOCKS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "requirements.lock", *ROOT.glob("images/*/*.txt"), *ROOT.glob("release/*.txt"))
)
PROGRAM = f"kubectl-etj-{this_platform().os}-{this_platform().arch}"
PLUGIN = (PROGRAM, f"{PROGRAM}.tar.gz", "etj.yaml")
TEXTS = (".py", ".txt", ".in")
EPOCH = 1_795_632_381
UV = """#!/bin/sh
# build --quiet --sdist --wheel --require-hashes --build-constraints PINS --out-dir TARGET SOURCE
test -s "$7" || exit 3
shift
echo "$SOURCE_DATE_EPOCH $(cksum < "$9/pyproject.toml")" | tee "$8/etj.whl" > "$8/etj.tar.gz"
"""


def copy_chart(folder: Path, *, touched: int, mode: int) -> Path:
    chart = folder / "chart"
    for path in reversed(list_chart_files(ROOT / CHART)):
        target = chart / path.relative_to(ROOT / CHART)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        target.chmod(mode)
        os.utime(target, (touched, touched))
    (chart / ".hidden").write_text("x")
    return chart


def test_a_chart_package_does_not_depend_on_times_modes_and_hidden_files(tmp_path: Path) -> None:
    packages = []
    for number, (touched, mode) in enumerate(((0, 0o600), (2_000_000_000, 0o755))):
        folder = tmp_path / str(number)
        packages.append(pack_chart(copy_chart(folder, touched=touched, mode=mode), folder, epoch=EPOCH).read_bytes())
    assert packages[0] == packages[1]


def test_a_chart_package_holds_the_chart(tmp_path: Path) -> None:
    package = pack_chart(ROOT / CHART, tmp_path, epoch=EPOCH)
    version = read_version(ROOT)[1]
    assert package.name == f"elastic-training-operator-{version}.tgz"
    with tarfile.open(package) as archive:
        held = {entry.name: entry for entry in archive}
        assert next(iter(held)) == "elastic-training-operator/Chart.yaml"
        for path in list_chart_files(ROOT / CHART):
            entry = held.pop(f"elastic-training-operator/{path.relative_to(ROOT / CHART).as_posix()}")
            found = archive.extractfile(entry)
            assert found is not None and found.read() == path.read_bytes()
            assert (entry.mtime, entry.mode, entry.uid, entry.uname) == (EPOCH, 0o644, 0, "")
    assert held == {}


def test_a_bill_of_materials_lists_every_pin_with_the_images_that_have_it(tmp_path: Path) -> None:
    pins = {image: read_versions(ROOT / "images" / image / "requirements.txt") for image in IMAGES}
    (tmp_path / "a.whl").write_bytes(b"a")
    bill = make_sbom("etj", "1.0", pins, epoch=EPOCH, files=(tmp_path / "a.whl",))
    assert bill == make_sbom("etj", "1.0", pins, epoch=EPOCH, files=(tmp_path / "a.whl",))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["timestamp"] == "2026-11-25T18:46:21Z"
    listed = {
        (item["value"], part["name"], part["version"]) for part in bill["components"] for item in part["properties"]
    }
    assert listed == {(image, *pin) for image, found in pins.items() for pin in found.items()}
    references = [part["bom-ref"] for part in bill["components"]]
    assert len(set(references)) == len(references) > 50
    assert {"kopf", "aiohttp", "numpy"} <= {part["name"] for part in bill["components"]}
    assert {part["ref"] for part in bill["dependencies"]} == {*references, "pkg:pypi/etj@1.0"}
    assert bill["metadata"]["component"]["components"][0]["hashes"][0]["content"].startswith("ca978112ca1bbdca")


def test_a_line_that_is_no_pin_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("# comment\nTorch==2.1.0+cpu\nA_b.c[x]==1 ; python_version > '3'\n")
    assert read_versions(path) == {"torch": "2.1.0+cpu", "a-b-c": "1"}
    one, two = (f"sha256:{digit * 64}" for digit in "ab")
    path.write_text(f"# of uv\nA.b==1 \\\n    --hash={one} \\\n    --hash={two}\nc==2 --hash={one}\n")
    assert read_pins(path) == {"a-b": Pin(version="1", hashes=(one, two)), "c": Pin(version="2", hashes=(one,))}
    path.write_text("numpy>=2\n")
    with pytest.raises(PinError, match=r"requirements\.txt:1: expected NAME==VERSION, found 'numpy>=2'"):
        read_pins(path)
    path.write_text(f"a==1 \\\n    --hash={one}\n\nb==1 \\\n    --hash=sha256:12\n")
    with pytest.raises(PinError, match=r"requirements\.txt:4: expected sha256: and 64 digits, found 'sha256:12'"):
        read_pins(path)


@pytest.mark.parametrize("path", LOCKS)
def test_every_pin_has_the_hashes_of_its_files(path: str) -> None:
    assert all(pin.hashes for pin in read_pins(ROOT / path).values())


def test_the_hashes_of_the_images_are_those_of_the_lock() -> None:
    locked = read_pins(ROOT / "requirements.lock")
    for path in LOCKS:
        if path.startswith("images/"):
            assert {name: locked[name] for name in read_pins(ROOT / path)} == read_pins(ROOT / path), path


def test_the_build_is_pinned() -> None:
    required = (ROOT / "pyproject.toml").read_text().split("requires = [")[1].split("]")[0]
    assert "hatchling" in required and "," not in required
    assert "hatchling" in read_pins(ROOT / "release/build-requirements.txt")


def read_layout(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Return manifest, config and package of a chart's layout after checking all that the image specification asks."""
    with tarfile.open(path) as archive:
        entries = archive.getmembers()
        files = {entry.name: io_of(archive, entry) for entry in entries if entry.isfile()}
    assert {(entry.mtime, entry.uid, entry.uname) for entry in entries} == {(EPOCH, 0, "")}
    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(files.pop("index.json"))
    blobs = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in files.values()}
    assert set(files) == {f"blobs/{digest.replace(':', '/')}" for digest in blobs}

    def take(descriptor: dict[str, Any], media_type: str) -> bytes:
        data = blobs.pop(descriptor["digest"])
        assert (descriptor["mediaType"], descriptor["size"]) == (media_type, len(data))
        return data

    assert set(index) == {"schemaVersion", "manifests"} and index["schemaVersion"] == 2
    (entry,) = index["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": read_version(ROOT)[1]}
    manifest = json.loads(take(entry, "application/vnd.oci.image.manifest.v1+json"))
    assert (manifest["schemaVersion"], manifest["mediaType"]) == (2, entry["mediaType"])
    config = json.loads(take(manifest["config"], "application/vnd.cncf.helm.config.v1+json"))
    (layer,) = manifest["layers"]
    package = take(layer, "application/vnd.cncf.helm.chart.content.v1.tar+gzip")
    assert not blobs, "nothing lies there that nothing names"
    return manifest, config, package


def io_of(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(entry)
    assert file is not None
    return file.read()


def test_the_charts_layout_holds_the_package_with_helms_media_types(tmp_path: Path) -> None:
    package = pack_chart(ROOT / CHART, tmp_path, epoch=EPOCH)
    layout = pack_layout(package, tmp_path, epoch=EPOCH)
    before = layout.read_bytes()
    manifest, config, content = read_layout(layout)
    assert content == package.read_bytes()
    assert config == yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())
    assert manifest["annotations"]["org.opencontainers.image.version"] == config["version"]
    assert pack_layout(package, tmp_path, epoch=EPOCH).read_bytes() == before


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of two commits with what a release needs."""
    folder = tmp_path / "checkout"
    copy_chart(folder, touched=5, mode=0o644).rename(tmp_path / "chart")
    (folder / CHART.parent).mkdir(parents=True)
    (tmp_path / "chart").rename(folder / CHART)
    names = ["LICENSE", "pyproject.toml", "requirements.lock", *(f"images/{i}/requirements.txt" for i in IMAGES)]
    for top in ("release", "krew", "operator/elastic_operator", "reshard_job/reshard"):
        names += [path.relative_to(ROOT).as_posix() for path in (ROOT / top).rglob("*") if path.suffix in TEXTS]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    environment = {**os.environ, "GIT_AUTHOR_DATE": f"{EPOCH} +0000", "GIT_COMMITTER_DATE": f"{EPOCH} +0000"}
    user = ["-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], [*user, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=folder, env=environment, check=True)
    uv = tmp_path / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    return folder


def make(checkout: Path, number: int) -> list[Path]:
    base = checkout.parent
    scratch, target = base / f"scratch-{number}", base / f"files-{number}"
    scratch.mkdir()
    target.mkdir()
    return build_release(checkout, scratch, target, uv=base / "uv", plugin=["--installed"])


def test_the_files_depend_on_the_commit_and_not_on_what_lies_around(checkout: Path) -> None:
    first = make(checkout, 1)
    (checkout / "pyproject.toml").write_text("an edit that is not committed")
    (checkout / CHART / "new.yaml").write_text("a file that is not committed")
    second = make(checkout, 2)
    version = read_version(ROOT)[1]
    name = f"elastic-training-operator-{version}"
    assert [path.name for path in first] == sorted(
        ["etj.whl", "etj.tar.gz", f"{name}.tgz", f"{name}.chart.oci.tar", f"{name}.cdx.json", CHECKSUMS, *PLUGIN]
    )
    assert find_differences(first, second) == []
    assert (checkout.parent / "files-1/etj.whl").read_text().startswith(f"{EPOCH} ")
    done = subprocess.run(["sha256sum", "--check", CHECKSUMS], cwd=first[0].parent, capture_output=True, check=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(first) - 1
    bill = json.loads((first[0].parent / f"{name}.cdx.json").read_text())
    assert [part["name"] for part in bill["metadata"]["component"]["components"]] == [
        path.name for path in first if path.name not in (CHECKSUMS, f"{name}.cdx.json")
    ]
    second[0].write_bytes(b"other")
    assert find_differences(first, second[:-1]) == sorted([second[0].name, second[-1].name])


def test_a_chart_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHART).mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    chart = yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())
    (tmp_path / CHART / "Chart.yaml").write_text(yaml.safe_dump({**chart, "appVersion": "9.9.9"}))
    with pytest.raises(ReleaseError, match=r"found 0\.1\.0 and 9\.9\.9: make them equal"):
        read_version(tmp_path)


def test_a_build_that_fails_is_told_with_its_output(checkout: Path) -> None:
    (checkout.parent / "uv").write_text("#!/bin/sh\necho no network >&2\nexit 2\n")
    with pytest.raises(build.ReleaseError, match="exit code 2:\nno network"):
        make(checkout, 1)
