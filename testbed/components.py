"""The programs that a cluster is made of: from the cache, else the official downloads, else built from source.

Nothing is installed into the machine. Every program appears in the cache by one rename, so an interrupted build is
simply continued.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.errors import TestbedError
from testbed.paths import cache_dir
from testbed.shell import run, run_with_progress, say

# What the tests are run with; the canary sets another one.
DEFAULT_KUBERNETES_VERSION = "1.36.3"
KUBERNETES_VERSION = os.environ.get("ETJ_KUBERNETES_VERSION") or DEFAULT_KUBERNETES_VERSION
KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
RUNTIME = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "etcd")
CNI = ("bridge", "host-local", "loopback", "portmap")
_CONNECT_SECONDS = 3

HELM_VERSION = "4.2.4"
"""The newest one that is made of the same libraries as this Kubernetes: so they are compiled once."""
KUEUE_VERSION = "0.19.2"
HELM_PACKAGE = "helm.sh/helm/v4/cmd/helm"
KUEUE_PACKAGE = "sigs.k8s.io/kueue/cmd/kueue"
_BESIDE = {"helm.sh/helm/v4": HELM_VERSION, "sigs.k8s.io/kueue": KUEUE_VERSION}

# Staging modules of k8s.io/kubernetes: its go.mod points at folders beside it, which the module proxy does not serve.
_STAGING = (
    "api",
    "apiextensions-apiserver",
    "apimachinery",
    "apiserver",
    "cli-runtime",
    "client-go",
    "cloud-provider",
    "cluster-bootstrap",
    "code-generator",
    "component-base",
    "component-helpers",
    "controller-manager",
    "cri-api",
    "cri-client",
    "cri-streaming",
    "streaming",
    "csi-translation-lib",
    "dynamic-resource-allocation",
    "endpointslice",
    "externaljwt",
    "kms",
    "kube-aggregator",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "metrics",
    "mount-utils",
    "pod-security-admission",
    "sample-apiserver",
    "sample-cli-plugin",
    "sample-controller",
)

# Releases with a checksum file beside each archive: (url, checksum url, members to take).
_RELEASES = {
    "containerd": (
        "https://github.com/containerd/containerd/releases/download/v2.1.4/containerd-2.1.4-linux-amd64.tar.gz",
        ".sha256sum",
        ("containerd", "containerd-shim-runc-v2", "ctr"),
    ),
    "runc": ("https://github.com/opencontainers/runc/releases/download/v1.3.0/runc.amd64", "", ("runc",)),
    "etcd": (
        "https://github.com/etcd-io/etcd/releases/download/v3.6.4/etcd-v3.6.4-linux-amd64.tar.gz",
        "",
        ("etcd",),
    ),
    "cni": (
        "https://github.com/containernetworking/plugins/releases/download/v1.7.1/cni-plugins-linux-amd64-v1.7.1.tgz",
        ".sha256",
        CNI,
    ),
}


def bin_dir() -> Path:
    """Programs of this version of the test bed."""
    return cache_dir() / f"bin-{KUBERNETES_VERSION}"


def cni_dir() -> Path:
    """Network plugins, which containerd wants in a folder of their own."""
    return bin_dir() / "cni"


def missing() -> list[Path]:
    """List the programs that are not in the cache yet."""
    wanted = [bin_dir() / name for name in (*KUBERNETES, *RUNTIME)] + [cni_dir() / name for name in CNI]
    return [path for path in wanted if not path.exists()]


def ensure() -> None:
    """Bring every program into the cache.

    Raises:
        TestbedError: neither downloads nor package registries can be reached, or a build failed.
    """
    if not missing():
        return
    cni_dir().mkdir(parents=True, exist_ok=True)
    online = reachable("https://dl.k8s.io/")
    if any(path.name in (*RUNTIME, *CNI) for path in missing()):
        say("getting containerd, runc, etcd and the network plugins")
        _download_runtime() if online else _unpack_runtime()
    absent = [path.name for path in missing()]
    if absent:
        say(f"getting Kubernetes {KUBERNETES_VERSION}: {', '.join(absent)}")
        _download_kubernetes(absent) if online else _build_kubernetes(absent)
    if missing():
        raise TestbedError(f"still missing after the build: {[str(path) for path in missing()]}")


def reachable(url: str) -> bool:
    """Return True if a server answers at `url`."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_CONNECT_SECONDS):
            return True
    except (urllib.error.URLError, OSError):
        return False


def place(source: Path, target: Path) -> None:
    """Copy beside the target, then rename: a reader never sees half a program."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, draft)
    draft.chmod(0o755)
    draft.rename(target)


def fetch(url: str, target: Path) -> str:
    """Download and return the SHA-256 in hex."""
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=60) as answer, open(target, "wb") as stream:
        while block := answer.read(1 << 20):
            digest.update(block)
            stream.write(block)
    return digest.hexdigest()


def check(url: str, checksum_url: str, actual: str) -> None:
    """Compare a SHA-256 with the one that the publisher lists.

    Raises:
        TestbedError: they differ.
    """
    with urllib.request.urlopen(checksum_url, timeout=60) as answer:
        listing = answer.read().decode()
    name = url.rsplit("/", 1)[1]
    lines = [line.split() for line in listing.splitlines() if line.strip()]
    expected = next((line[0] for line in lines if len(line) == 1 or line[-1].lstrip("*./") == name), None)
    if expected != actual:
        raise TestbedError(f"{url}: SHA-256 {actual}, the publisher says {expected}")


def _download_kubernetes(names: list[str]) -> None:
    base = f"https://dl.k8s.io/v{KUBERNETES_VERSION}/bin/linux/amd64"
    with tempfile.TemporaryDirectory(dir=bin_dir()) as folder:
        for name in names:
            say(f"downloading {name}")
            draft = Path(folder) / name
            check(name, f"{base}/{name}.sha256", fetch(f"{base}/{name}", draft))
            place(draft, bin_dir() / name)


def _download_runtime() -> None:
    with tempfile.TemporaryDirectory(dir=bin_dir()) as folder:
        for url, suffix, members in _RELEASES.values():
            archive = Path(folder) / url.rsplit("/", 1)[1]
            say(f"downloading {archive.name}")
            actual = fetch(url, archive)
            sums = {"runc": "runc.sha256sum", "etcd": "SHA256SUMS"}.get(members[0])
            check(url, f"{url.rsplit('/', 1)[0]}/{sums}" if sums else url + suffix, actual)
            for member in members:
                target = (cni_dir() if member in CNI else bin_dir()) / member
                if archive.suffix in (".gz", ".tgz"):
                    with tarfile.open(archive) as tar:
                        entry = next(item for item in tar if item.isfile() and Path(item.name).name == member)
                        content = tar.extractfile(entry)
                        assert content is not None
                        (Path(folder) / member).write_bytes(content.read())
                    place(Path(folder) / member, target)
                else:
                    place(archive, target)


def _unpack_runtime() -> None:
    """Unpack Debian's packages: containerd and etcd come from the suite that has current ones.

    runc comes from the machine's own suite, since the newer one needs a newer C library.
    """
    root = unpack_debian_packages(
        "runtime",
        {"forky": ("containerd", "containernetworking-plugins", "etcd-server"), "bookworm": ("runc",)},
    )
    for name in RUNTIME:
        place(find_program(root, name, "usr/bin", "usr/sbin"), bin_dir() / name)
    for name in CNI:
        place(find_program(root, name, "usr/lib/cni"), cni_dir() / name)


def unpack_debian_packages(name: str, packages: Mapping[str, Sequence[str]]) -> Path:
    """Unpack Debian packages into the cache, with a package state of our own: the machine's stays as it is.

    Args:
        name: of the set of packages, and of its folder.
        packages: names of packages by suite.

    Returns:
        The folder that stands for `/`.

    Raises:
        TestbedError: this is no Debian machine, or a package cannot be had.
    """
    if shutil.which("apt-get") is None:
        raise TestbedError("the official downloads cannot be reached and this is no Debian machine: use kind instead")
    work = cache_dir() / "debian" / name
    for folder in ("lists/partial", "cache/archives/partial", "parts", "deb", "root"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    mirror = _debian_mirror()
    source = f"Types: deb\nURIs: {mirror}\nSuites: {{suite}}\nComponents: main\n"
    source += "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    shutil.copyfile("/var/lib/dpkg/status", work / "status")
    for suite, wanted in packages.items():
        (work / "parts" / "suite.sources").write_text(source.format(suite=suite))
        options = [
            f"-oDir::State::Lists={work}/lists",
            f"-oDir::Cache={work}/cache",
            "-oDir::Etc::sourcelist=/dev/null",
            f"-oDir::Etc::sourceparts={work}/parts",
            f"-oDir::State::status={work}/status",
            "-oAPT::Sandbox::User=root",
        ]
        run("apt-get", *options, "-q", "update")
        run("apt-get", *options, "-q", "download", *wanted, cwd=work / "deb")
    for package in sorted((work / "deb").glob("*.deb")):
        run("dpkg", "-x", package, work / "root")
    return work / "root"


def _debian_mirror() -> str:
    for path in sorted(Path("/etc/apt").glob("sources.list.d/*.sources")):
        for line in path.read_text().splitlines():
            if line.startswith("URIs:") and "security" not in line:
                return line.split()[1]
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt").glob("sources.list.d/*.list"))]:
        for line in path.read_text().splitlines() if path.exists() else []:
            words = line.split()
            if words[:1] == ["deb"] and "security" not in line:
                return next(word for word in words[1:] if "://" in word)
    raise TestbedError("no Debian package source in /etc/apt: use kind instead")


def find_program(root: Path, name: str, *folders: str) -> Path:
    """Return the path of a program below `root`.

    Raises:
        TestbedError: it is in none of the folders.
    """
    for folder in folders:
        if (path := root / folder / name).is_file():
            return path
    raise TestbedError(f"no {name} in {', '.join(folders)} of the unpacked packages under {root}")


def write_module(folder: Path, version: str = KUBERNETES_VERSION) -> None:
    """Write a go.mod from whose folder programs of k8s.io/kubernetes, helm and Kueue can be built."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = "v0" + version[1:]
    needed = {"k8s.io/kubernetes": version, **_BESIDE}
    requires = "".join(f"\t{name} v{number}\n" for name, number in needed.items())
    replaces = "".join(f"\tk8s.io/{name} => k8s.io/{name} {staged}\n" for name in _STAGING)
    (folder / "go.mod").write_text(f"module testbed\n\ngo 1.26.0\n\nrequire (\n{requires})\n\nreplace (\n{replaces})\n")


def build_go_programs(
    packages: Mapping[Path, str], stamps: Mapping[str, str], *, version: str = KUBERNETES_VERSION
) -> Path:
    """Build programs from Go modules, with the libraries of one version of Kubernetes.

    What these programs have in common is compiled once: 12 minutes for Kubernetes, helm and Kueue on two cores, and
    seconds with Go's own cache.

    Args:
        packages: what to build, by the program's place in the cache.
        stamps: values of the programs' string variables, by full name.
        version: of Kubernetes.

    Returns:
        The folder that they were built from.

    Raises:
        TestbedError: there is no Go, or a build failed.
    """
    if shutil.which("go") is None:
        raise TestbedError(
            "the official downloads cannot be reached and there is no Go to build with: use kind instead"
        )
    module = cache_dir() / f"build-{version}"
    write_module(module, version)
    known = [f"k8s.io/kubernetes/cmd/{name}" for name in (*KUBERNETES, "kube-proxy")] + [HELM_PACKAGE, KUEUE_PACKAGE]
    imports = "".join(f'\t_ "{package}"\n' for package in known)
    (module / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n")
    # The compiler is a short process: collecting its garbage less often takes memory instead of time.
    env = {"GOGC": "400", **os.environ, "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0"}
    log = module / "build.log"
    run_with_progress("resolving Go modules", ["go", "mod", "tidy"], cwd=module, env=env, log=log)
    names = ", ".join(path.name for path in packages)
    flags = "-s -w" + "".join(f" -X {variable}={value}" for variable, value in stamps.items())
    with tempfile.TemporaryDirectory(dir=module) as drafts:
        # The linker drops what debuggers read (-s -w): the compiler need not make it, which saves a tenth of its time.
        options = ["-trimpath", "-gcflags", "all=-dwarf=false", "-ldflags", flags]
        command = ["go", "build", *options, "-o", f"{drafts}/", *packages.values()]
        run_with_progress(f"building {names}", command, cwd=module, env=env, log=log)
        for program in packages:
            place(Path(drafts) / program.name, program)
    return module


def _build_kubernetes(names: Sequence[str]) -> None:
    major, minor, _ = KUBERNETES_VERSION.split(".")
    stamp = {
        "gitVersion": f"v{KUBERNETES_VERSION}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitCommit": "unknown",
        "gitTreeState": "clean",
    }
    build_go_programs(
        {bin_dir() / name: f"k8s.io/kubernetes/cmd/{name}" for name in names},
        {f"k8s.io/component-base/version.{key}": value for key, value in stamp.items()},
    )
