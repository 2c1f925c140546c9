"""Images: pins, layers that are the same every time, and Dockerfiles that agree with them."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.pins import Pin, read_pins
from testbed import oci, project, rootfs
from testbed.errors import TestbedError

ROOT = Path(__file__).parents[3]
IMAGES = {"operator": ("operator",), "reshard": ("reshard",), "example": ("reshard", "trainer", "engine")}
DOCKERFILES = {name: (ROOT / "images" / name / "Dockerfile").read_text() for name in IMAGES}


def pins(path: str) -> dict[str, Pin]:
    """Versions and hashes of a requirements file."""
    return read_pins(ROOT / path)


def closure(extras: Iterable[str]) -> set[str]:
    """Return the packages that extras of the project need, by the metadata of the packages that are installed here."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    todo = [Requirement(line) for extra in extras for line in optional[extra]]
    found: set[tuple[str, str]] = set()
    while todo:
        wanted = todo.pop()
        for extra in {"", *wanted.extras}:
            name = canonicalize_name(wanted.name)
            if (name, extra) in found:
                continue
            found.add((name, extra))
            lines = importlib.metadata.requires(name) or []
            more = [Requirement(line) for line in lines]
            todo += [item for item in more if item.marker is None or item.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@pytest.mark.parametrize(("image", "extras"), IMAGES.items())
def test_an_image_gets_exactly_what_its_extras_need_in_the_locked_versions(image: str, extras: tuple[str, ...]) -> None:
    found = pins(f"images/{image}/requirements.txt")
    locked = pins("requirements.lock")
    assert found == {name: locked[name] for name in found}, "run `make lock-images`"
    assert set(found) == closure(extras), "run `make lock-images`"


def test_an_image_on_top_of_a_vendors_torch_brings_none() -> None:
    found = pins("images/example/requirements-without-torch.txt")
    everything = pins("images/example/requirements.txt")
    assert {"torch", "triton"} <= set(everything) - set(found)
    assert not [name for name in found if name.startswith(("nvidia", "cuda", "torch", "triton"))]
    assert {"deepspeed", "numpy"} <= set(found)


def test_the_operator_imports_and_plans_without_what_its_image_lacks(tmp_path: Path) -> None:
    allowed = closure(["operator"])
    code = (
        "import importlib.metadata, sys\n"
        "before = set(sys.modules)\n"
        "import elastic_operator.main, elastic_operator.manifests.attempt, elastic_operator.plugin.main\n"
        # A namespace package such as `google` has no file: to look for an optional module in it imports nothing.
        "new = [name for name in set(sys.modules) - before if getattr(sys.modules[name], '__file__', None)]\n"
        "files = {name.split('.')[0] for name in new}\n"
        "owners = importlib.metadata.packages_distributions()\n"
        "print(*sorted({owner for name in files for owner in owners.get(name, [])}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    used = {canonicalize_name(name) for name in done.stdout.split()}
    assert {"aiohttp", "kopf", "kubernetes"} <= used, "the check sees what is imported"
    assert used - {"elastic-training-operator"} <= allowed
    assert not {"numpy", "torch"} & allowed


def test_the_operator_starts_without_the_generated_code_that_its_image_leaves_out() -> None:
    code = (
        "import re, sys\n"
        "class Absent:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if re.match('kubernetes[.](aio[.])?client[.](api|models)[.]', name):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent)\n"
        "import elastic_operator.main, elastic_operator.plugin.main\n"
        "from kubernetes.client import CoreV1Api\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    # The last line shows that the code is absent. kopf's own import of models is optional.
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: kubernetes.client.api.core_v1_api", done.stderr


def tree(root: Path, names: Iterable[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {name}")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o700)
    (root / "link").symlink_to("a/b")
    (root / "tmp").mkdir(mode=0o700)
    return root


def test_a_layer_depends_on_names_contents_and_executability_and_nothing_else(tmp_path: Path) -> None:
    first = tree(tmp_path / "one", ["a/b", "z", "m"])
    second = tree(tmp_path / "two", ["m", "z", "a/b"])
    os.utime(second / "z", (1, 1))
    (second / "z").chmod(0o640)
    os.chown(second / "m", os.geteuid(), os.getegid())
    oci.pack(first, tmp_path / "1.tar")
    oci.pack(second, tmp_path / "2.tar")
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    (second / "z").chmod(0o750)
    oci.pack(second, tmp_path / "3.tar")
    assert oci.Layer.of(tmp_path / "3.tar").digest != oci.Layer.of(tmp_path / "1.tar").digest


def test_a_layer_is_owned_by_root_and_holds_links_modes_and_a_common_tmp(tmp_path: Path) -> None:
    oci.pack(tree(tmp_path / "one", ["a/b"]), tmp_path / "1.tar")
    with tarfile.open(tmp_path / "1.tar") as archive:
        entries = {entry.name: entry for entry in archive}
    assert {(entry.uid, entry.gid, entry.mtime) for entry in entries.values()} == {(0, 0, 0)}
    assert entries["link"].issym()
    assert entries["link"].linkname == "a/b"
    assert {name: oct(entries[name].mode) for name in ("a", "a/b", "run", "tmp")} == {
        "a": "0o755", "a/b": "0o644", "run": "0o755", "tmp": "0o1777"
    }  # fmt: skip


def test_an_archive_holds_shared_layers_once_and_every_blob_under_its_digest(tmp_path: Path) -> None:
    shared, own = oci.layer_of(files={"a": (b"x", 0o644)}), oci.layer_of(files={"b": (b"y", 0o644)})
    one = oci.Image(reference="localhost/one:1", layers=(shared,), entrypoint=("/a",), user="65532")
    two = oci.Image(reference="localhost/two:1", layers=(shared, own), environment={"X": "1"})
    oci.write(tmp_path / "both.tar", [one, two])
    with tarfile.open(tmp_path / "both.tar") as archive:
        content = {entry.name: (archive.extractfile(entry) or pytest.fail()).read() for entry in archive}
    blobs = {name.rpartition("/")[2]: data for name, data in content.items() if name.startswith("blobs/")}
    assert len(blobs) == 2 + 2 + 2, "layers, configurations, manifests"
    assert all(oci.Layer.of(data).digest == name for name, data in blobs.items())
    index = json.loads(content["index.json"])["manifests"]
    assert [item["annotations"]["io.containerd.image.name"] for item in index] == [one.reference, two.reference]
    assert [item["digest"] for item in index] == [f"sha256:{one.digest}", f"sha256:{two.digest}"]
    manifest = json.loads(blobs[two.digest])
    assert [item["digest"] for item in manifest["layers"]] == [f"sha256:{shared.digest}", f"sha256:{own.digest}"]
    run = json.loads(blobs[json.loads(blobs[one.digest])["config"]["digest"].removeprefix("sha256:")])["config"]
    assert (run["User"], run["Entrypoint"]) == ("65532", ["/a"])
    before = (tmp_path / "both.tar").read_bytes()
    oci.write(tmp_path / "both.tar", [one, two])
    assert (tmp_path / "both.tar").read_bytes() == before


def test_an_edit_changes_the_key_of_what_it_belongs_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "CHECKOUT", tmp_path)
    tree(tmp_path / "operator", ["a.py", "b.py"])
    tree(tmp_path / "examples", ["train.py"])
    before = project._tree_key(["operator"]), project._tree_key(["examples"])
    (tmp_path / "operator" / "__pycache__").mkdir()
    (tmp_path / "operator" / "__pycache__" / "a.pyc").write_text("made by running it")
    assert (project._tree_key(["operator"]), project._tree_key(["examples"])) == before
    (tmp_path / "operator" / "a.py").write_text("edited")
    assert project._tree_key(["operator"]) != before[0]
    assert project._tree_key(["examples"]) == before[1]
    (tmp_path / "operator" / "b.py").rename(tmp_path / "operator" / "c.py")
    assert len({before[0], project._tree_key(["operator"])}) == 2


def test_the_libraries_of_a_program_are_found_and_a_missing_one_is_named(tmp_path: Path) -> None:
    found = rootfs.libraries([Path(sys.base_prefix, "bin", rootfs.PYTHON)])
    assert "libc.so.6" in found
    assert all(path.exists() for path in found.values())
    broken = tmp_path / "program"
    broken.write_bytes(Path("/bin/ls").read_bytes().replace(b"libc.so.6\0", b"libx.so.6\0"))
    broken.chmod(0o755)
    with pytest.raises(TestbedError, match=r"libx\.so\.6"):
        rootfs.libraries([broken])


def make_wheel(folder: Path) -> Path:
    """Write the smallest wheel."""
    folder.mkdir()
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    return wheel


def test_an_installed_wheel_does_not_tell_where_it_came_from(tmp_path: Path) -> None:
    packed = []
    for name in ("one", "two"):
        root = tmp_path / f"{name}-root"
        rootfs._install(root, str(make_wheel(tmp_path / name)))
        oci.pack(root, tmp_path / f"{name}.tar")
        packed.append((tmp_path / f"{name}.tar").read_bytes())
        records = [
            line.split(",")[0] for line in (root / rootfs.SITE / "tiny-1.0.dist-info/RECORD").read_text().splitlines()
        ]
        assert all((root / rootfs.SITE / record).exists() for record in records), "nothing is listed that is not there"
    assert packed[0] == packed[1]


@pytest.mark.parametrize("name", IMAGES)
def test_dockerfiles_are_pinned_unprivileged_and_the_same_for_every_architecture(name: str) -> None:
    text = DOCKERFILES[name]
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, flags=re.MULTILINE)
    assert bases, "the base is an argument"
    assert all(re.search(r":\d+\.\d+\.\d+-[a-z-]+@sha256:[0-9a-f]{64}$", base) for base in bases), "a digest"
    assert set(re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)) <= {"${PYTHON_IMAGE}", "${BASE_IMAGE}"}
    assert text.count("\nFROM ") == 2, "what builds is not what runs"
    assert re.findall(r"^USER (.*)$", text, flags=re.MULTILINE) == ["65532:65532"], "a number: runAsNonRoot can see it"
    assert not re.search(r"amd64|x86_64|arm64|aarch64", text)
    installs = re.findall(r"pip install (.*?)(?:&&|$)", text.replace("\\\n", " "), flags=re.MULTILINE)
    assert len(installs) == 3
    assert all("--no-deps" in line for line in installs)
    assert all("--require-hashes" in line or "--no-build-isolation" in line for line in installs)
    for label in ("title", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in text
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, flags=re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split()), line
        patterns = (ROOT / ".dockerignore").read_text()
        assert all(f"!{source.split('/')[0]}" in patterns for source in line.split()), (
            f".dockerignore leaves out {line}"
        )


def test_the_test_bed_and_the_dockerfiles_make_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "_layer", lambda kind, *_: oci.layer_of(files={kind: (b"", 0o644)}))
    made = {image.reference.partition("-training-")[2].partition(":")[0]: image for image in project.definitions()}
    assert set(made) == set(DOCKERFILES)
    for name in ("operator", "reshard"):
        entrypoint = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILES[name], flags=re.MULTILINE)[0])
        assert list(made[name].entrypoint) == entrypoint
        assert f'title="{made[name].labels["org.opencontainers.image.title"]}"' in DOCKERFILES[name]
    for name, image in made.items():
        assert image.user == "65532:65532"
        assert all(f"{key}={value}" in DOCKERFILES[name] for key, value in image.environment.items())
        assert f"ARG VERSION={project.VERSION}\n" in DOCKERFILES[name]


def test_without_a_builder_make_images_names_the_way_without_one(tmp_path: Path) -> None:
    for tool in ("sh", "dirname", "sed", "git", "timeout"):
        found = next(path for folder in ("/bin", "/usr/bin") if (path := Path(folder, tool)).exists())
        (tmp_path / tool).symlink_to(found)
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run([ROOT / "images/build.sh"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "none of docker (with a running engine), podman and buildah works here" in done.stderr
    assert "python -m testbed images --load" in done.stderr
    environment["BUILDER"] = "docker"
    done = subprocess.run([ROOT / "images/build.sh"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "BUILDER=docker does not work here" in done.stderr
