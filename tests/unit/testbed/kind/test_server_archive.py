"""Images for `kind build node-image`: their names come from kubeadm and kind's source, their parts from files."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from pathlib import Path

import pytest

from testbed.errors import TestbedError
from testbed.kind import build, server_archive
from testbed.kind.server_archive import Image

REQUIRED = ["example.org/kube-apiserver:v1", "example.org/coredns/coredns:v2", "example.org/pause:3.9"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder laid out as kind's module."""
    constants = tmp_path / "kind/pkg/build/nodeimage"
    constants.mkdir(parents=True)
    (constants / "const_cni.go").write_text('package x\n\nconst kindnetdImage = "a/kindnetd:v3"\n')
    (constants / "const_storage.go").write_text(
        'const storageProvisionerImage = "a/p:1"\nconst storageHelperImage = "a/h:1"\n'
    )
    config = tmp_path / "kind/images/base/files/etc/containerd/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('  sandbox_image = "example.org/pause:3.10"\n')
    return tmp_path / "kind"


def test_names_come_from_kubeadm_and_the_sandbox_from_kind(source: Path) -> None:
    assert server_archive.names(REQUIRED, source) == {
        "kube-apiserver": "example.org/kube-apiserver:v1",
        "coredns": "example.org/coredns/coredns:v2",
        "pause": "example.org/pause:3.10",
        "kindnetd": "a/kindnetd:v3",
        "provisioner": "a/p:1",
        "helper": "a/h:1",
    }
    (source / "pkg/build/nodeimage/const_cni.go").write_text("package x\n")
    with pytest.raises(TestbedError, match="no kindnetdImage"):
        server_archive.names(REQUIRED, source)


def test_an_archive_names_its_images_twice_and_holds_shared_layers_once(tmp_path: Path) -> None:
    base, program = tmp_path / "base", tmp_path / "program"
    base.write_bytes(b"base layer")
    program.write_bytes(b"program layer")
    images = {"one": Image((base, program), "/one"), "two": Image((base,), "/two"), "three": Image((base,), "/three")}
    references = {name: f"example.org:5000/{name}:v1" for name in images}
    path = tmp_path / "images.tar"
    server_archive.write_images(path, images, references, ["one", "two"])
    with tarfile.open(path) as tar:
        names = tar.getnames()
        content = {name: tar.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    assert len(names) == len(set(names))
    assert names[:2] == ["repositories", "manifest.json"]
    manifest = json.loads(content["manifest.json"])
    assert [item["RepoTags"] for item in manifest] == [["example.org:5000/one:v1"], ["example.org:5000/two:v1"]]
    assert [content[name] for name in manifest[0]["Layers"]] == [b"base layer", b"program layer"]
    for item in manifest:
        config = json.loads(content[item["Config"]])
        assert hashlib.sha256(content[item["Config"]]).hexdigest() == item["Config"].removesuffix(".json")
        layers = [f"sha256:{hashlib.sha256(content[name]).hexdigest()}" for name in item["Layers"]]
        assert config["rootfs"]["diff_ids"] == layers
    repositories = json.loads(content["repositories"])
    assert repositories == {
        f"example.org:5000/{name}": {"v1": item["Config"].removesuffix(".json")}
        for name, item in zip(("one", "two"), manifest, strict=True)
    }


def test_the_saved_image_is_another_one_when_the_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path))
    before = build.saved_image()
    assert before == build.saved_image()
    assert before.is_relative_to(tmp_path)
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "x.sh").write_text("true\n")
    monkeypatch.setattr(build, "RECIPE", recipe)
    assert build.saved_image() != before


def test_every_program_has_a_recipe() -> None:
    text = (build.RECIPE / "components.sh").read_text(encoding="utf-8")
    labels = re.findall(r"^([\w-]+(?: \| [\w-]+)*)\)", text, flags=re.MULTILINE)
    assert {"kind", *build.PROGRAMS} == {name for label in labels for name in label.split(" | ")}
