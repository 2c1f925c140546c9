"""Make kind and a node image from Go modules and Debian packages, once for each machine, in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from testbed import components
from testbed.errors import TestbedError
from testbed.kind import engine, server_archive
from testbed.kind.configuration import NODE_IMAGE
from testbed.kind.engine import Engine
from testbed.kind.paths import KIND_VERSION, build_dir
from testbed.shell import run_with_progress, say

RECIPE = Path(__file__).with_name("recipe")
PROGRAMS = ("kubeadm", "kube-proxy", "etcd", "coredns", "local-path-provisioner", "kindnetd", "pause")
"""What the node image has beside the programs of the test bed; etcd is the version that kubeadm asks for."""

_BASE_IMAGE = "localhost/etj-kind-base:1"
_IMAGE_PACKAGES = (
    *("libc6", "iptables", "libip4tc2", "libip6tc2", "libxtables12", "libnftnl11", "libmnl0", "libnfnetlink0"),
    *("libnetfilter-conntrack3", "busybox"),
)


def kind_program() -> Path:
    """Path of kind: the one on the PATH, else from the cache, else built from its Go module.

    Raises:
        TestbedError: there is neither kind nor Go.
    """
    found = shutil.which("kind")
    return Path(found) if found else ensure_program("kind")


def ensure_program(name: str) -> Path:
    """Path of a program of `recipe/components.sh`, which is built if the cache does not have it.

    Raises:
        TestbedError: there is no Go, or the build failed.
    """
    program = build_dir() / "bin" / name
    if not program.exists():
        if shutil.which("go") is None:
            raise TestbedError(
                f"there is no Go to build {name} with: install kind (https://kind.sigs.k8s.io) and a Docker that pulls"
            )
        _recipe("components.sh", f"building {name}", dict(os.environ), name)
    return program


def saved_image() -> Path:
    """File with the node image; its name changes with the recipe."""
    parts = [KIND_VERSION, components.KUBERNETES_VERSION, *_IMAGE_PACKAGES]
    files = [*sorted(RECIPE.rglob("*")), Path(server_archive.__file__)]
    parts += [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return build_dir() / f"node-image-{key}.tar.gz"


def ensure_node_image(daemon: Engine) -> str:
    """Give the daemon the node image that is built here, and return its name.

    Raises:
        CannotRunHereError: this is no Debian machine.
        TestbedError: a program failed.
    """
    if daemon.has_image(NODE_IMAGE):
        return NODE_IMAGE
    saved = saved_image()
    if not saved.exists():
        _build(daemon)
        for old in build_dir().glob("node-image-*.tar.gz"):
            old.unlink()
        draft = saved.with_name(f".{saved.name}")
        say("saving the node image")
        daemon("bash", "-o", "pipefail", "-c", f"docker save {NODE_IMAGE} | gzip -1 > {draft}")
        draft.rename(saved)
        return NODE_IMAGE
    say("loading the node image")
    daemon("docker", "load", "--input", saved)
    return NODE_IMAGE


def _build(daemon: Engine) -> None:
    say("building the node image: once for each machine, 10 to 15 minutes")
    components.ensure()
    components.write_module(_module_dir())
    for name in ("kind", *PROGRAMS):
        ensure_program(name)
    engine.unpack(engine.PACKAGES)
    work = build_dir() / "build"
    environment = {**daemon.variables(), "BASE_IMAGE": _BASE_IMAGE, "PROGRAMS": str(components.bin_dir())}
    _recipe("base-image.sh", "building the base image", environment)
    packages = build_dir() / "image-packages"
    engine.download(_IMAGE_PACKAGES, packages)
    images = work / "images"
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    say("writing the images of Kubernetes")
    archive = server_archive.write(
        images,
        programs=components.bin_dir(),
        built=build_dir() / "bin",
        packages=packages,
        kind_source=_kind_source(),
        version=f"v{components.KUBERNETES_VERSION}",
    )
    words = ["build", "node-image", "--type", "file", "--base-image", _BASE_IMAGE, "--image", NODE_IMAGE, str(archive)]
    command: list[str | Path] = [*daemon.enter, build_dir() / "bin/kind", *words]
    environment = {**daemon.variables(), "TMPDIR": str(work)}
    run_with_progress("building the node image", command, cwd=work, env=environment, log=build_dir() / "build.log")
    shutil.rmtree(images)


def _module_dir() -> Path:
    return build_dir() / "kubernetes-module"


def _kind_source() -> Path:
    words = ["go", "mod", "download", "-json", f"sigs.k8s.io/kind@{KIND_VERSION}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=build_dir())
    if done.returncode:
        raise TestbedError(f"`{' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")
    return Path(json.loads(done.stdout)["Dir"])


def _recipe(script: str, label: str, environment: dict[str, str], *arguments: str) -> None:
    folder = build_dir()
    (folder / "build").mkdir(parents=True, exist_ok=True)
    components.write_module(_module_dir())
    variables = {
        **environment,
        "LAB": str(folder),
        "KIND_VERSION": KIND_VERSION,
        "KUBERNETES_VERSION": components.KUBERNETES_VERSION,
        "KUBERNETES_MODULE": str(_module_dir()),
    }
    command: list[str | Path] = ["bash", RECIPE / script, *arguments]
    run_with_progress(label, command, cwd=folder / "build", env=variables, log=folder / "build.log")
