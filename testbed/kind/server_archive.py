"""Make the archive of Kubernetes' server that `kind build node-image --type file` takes, with every image inside.

kind takes four image archives out of it, and pulls each image that it needs and that none of them names. So the first
holds all the images: its entry "repositories", which kind reads, lists their names, and "manifest.json", which
containerd reads, their parts. The names come from kubeadm and from kind's source; none is written here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from testbed.errors import TestbedError
from testbed.shell import run

_SEPARATE = ("kube-controller-manager", "kube-scheduler", "kube-proxy")
_PATH = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLACE = "usr/local/bin"


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """An image: its layers from the bottom up, and the program that it runs."""

    layers: tuple[Path, ...]
    entrypoint: str


def names(required: Iterable[str], kind_source: Path) -> dict[str, str]:
    """Return the reference of every image, by the name that is used here.

    Args:
        required: lines of `kubeadm config images list`.
        kind_source: folder of kind's module.

    Raises:
        TestbedError: kind's source does not name an image where it did.
    """
    found = {re.sub(r":.*", "", reference).rsplit("/", 1)[1]: reference for reference in required}
    constants = kind_source / "pkg/build/nodeimage"
    sources = {
        "pause": (kind_source / "images/base/files/etc/containerd/config.toml", "sandbox_image"),
        "kindnetd": (constants / "const_cni.go", "kindnetdImage"),
        "provisioner": (constants / "const_storage.go", "storageProvisionerImage"),
        "helper": (constants / "const_storage.go", "storageHelperImage"),
    }
    for name, (path, variable) in sources.items():
        match = re.search(rf'{variable} = "([^"]+)"', path.read_text(encoding="utf-8"))
        if match is None:
            raise TestbedError(
                f"{path} has no {variable}: adapt testbed/kind/server_archive.py to this version of kind"
            )
        found[name] = match[1]
    return found


def write_images(path: Path, images: Mapping[str, Image], references: Mapping[str, str], chosen: Iterable[str]) -> None:
    """Write an archive as `docker save` does, with the images named in `chosen`."""
    manifest = []
    blobs: dict[str, bytes | Path] = {}
    repositories: dict[str, dict[str, str]] = {}
    for name in chosen:
        image = images[name]
        digests = [_digest(layer) for layer in image.layers]
        config = _configuration(image, digests)
        digest = hashlib.sha256(config).hexdigest()
        files = [f"{item}/layer.tar" for item in digests]
        blobs |= {f"{digest}.json": config, **dict(zip(files, image.layers, strict=True))}
        manifest.append({"Config": f"{digest}.json", "RepoTags": [references[name]], "Layers": files})
        repository, tag = references[name].rsplit(":", 1)
        repositories.setdefault(repository, {})[tag] = digest
    head = {"repositories": json.dumps(repositories).encode(), "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w") as tar:
        for entry, content in {**head, **blobs}.items():
            _add(tar, entry, content, mode=0o644)


def write(folder: Path, *, programs: Path, built: Path, packages: Path, kind_source: Path, version: str) -> Path:
    """Write the archive of version `version` below `folder`, and return its path.

    Args:
        folder: for the archive and what it is made of; must exist.
        programs: folder with Kubernetes' programs that the test bed uses, too.
        built: folder with the programs of `recipe/components.sh`.
        packages: folder with Debian packages of libc, iptables and busybox.
        kind_source: folder of kind's module.
        version: of Kubernetes, with its `v`.

    Raises:
        TestbedError: a program failed, or an image has no name.
    """
    required = run(built / "kubeadm", "config", "images", "list", "--kubernetes-version", version).split()
    references = names(required, kind_source)
    images = _images(folder, programs, built, packages)
    if unknown := sorted(images.keys() ^ references.keys()):
        raise TestbedError(f"images without a name or names without an image: {unknown}")
    server = folder / "kubernetes/server/bin"
    server.mkdir(parents=True, exist_ok=True)
    together = [name for name in images if name not in _SEPARATE]
    write_images(server / "kube-apiserver.tar", images, references, together)
    for name in _SEPARATE:
        write_images(server / f"{name}.tar", images, references, [name])
    (folder / "kubernetes/version").write_text(f"{version}\n")
    for path in (built / "kubeadm", programs / "kubelet", programs / "kubectl"):
        shutil.copy2(path, server)
    target = folder / "kubernetes-server.tar.gz"
    with tarfile.open(target, "w:gz", compresslevel=1) as tar:
        tar.add(folder / "kubernetes", arcname="kubernetes")
    return target


def _images(folder: Path, programs: Path, built: Path, packages: Path) -> dict[str, Image]:
    base = _base_layer(folder, packages)

    def layer(program: Path, at: str = _PLACE) -> Path:
        return _program_layer(folder / f"{program.name}.tar", program, at)

    images = {
        name: Image((layer(programs / name),), name)
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    }
    return images | {
        "kube-proxy": Image((base, layer(built / "kube-proxy")), "kube-proxy"),
        "etcd": Image((layer(built / "etcd"),), "etcd"),
        "coredns": Image((layer(built / "coredns", at=""),), "/coredns"),
        "pause": Image((layer(built / "pause", at=""),), "/pause"),
        "kindnetd": Image((base, layer(built / "kindnetd")), "kindnetd"),
        "provisioner": Image((layer(built / "local-path-provisioner"),), "local-path-provisioner"),
        "helper": Image((base,), "/bin/sh"),
    }


def _base_layer(folder: Path, packages: Path) -> Path:
    """libc, iptables and busybox, for the images that need a shell or iptables."""
    root = folder / "base"
    shutil.rmtree(root, ignore_errors=True)
    for package in sorted(packages.glob("*.deb")):
        run("dpkg", "-x", package, root)
    shutil.rmtree(root / "usr/share", ignore_errors=True)
    for link in (
        root / f"usr/sbin/{name}{end}" for name in ("iptables", "ip6tables") for end in ("", "-save", "-restore")
    ):
        link.unlink(missing_ok=True)
        link.symlink_to("xtables-nft-multi")
    busybox = next(path for path in (root / "bin/busybox", root / "usr/bin/busybox") if path.exists())
    (root / "bin").mkdir(exist_ok=True)
    for name in run(busybox, "--list").split():
        link = root / "bin" / name
        if name != "busybox" and not link.exists():
            link.symlink_to("busybox")
    for name in ("tmp", "etc", "run", "proc", "sys", "dev", "var"):
        (root / name).mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    target = folder / "base.tar"
    with tarfile.open(target, "w") as tar:
        tar.add(root, arcname=".", filter=_owned_by_root)
    return target


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _program_layer(target: Path, program: Path, at: str) -> Path:
    with tarfile.open(target, "w") as tar:
        parts = at.split("/") if at else []
        for length in range(1, len(parts) + 1):
            entry = tarfile.TarInfo("/".join(parts[:length]))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        _add(tar, "/".join([*parts, program.name]), program, mode=0o755)
    return target


def _configuration(image: Image, digests: list[str]) -> bytes:
    value = {
        "architecture": "amd64",
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {"Entrypoint": [image.entrypoint], "Env": [_PATH], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created_by": "testbed.kind"} for _ in digests],
    }
    return json.dumps(value).encode()


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path, *, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    if isinstance(content, bytes):
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
        return
    entry.size = content.stat().st_size
    with open(content, "rb") as stream:
        tar.addfile(entry, stream)
