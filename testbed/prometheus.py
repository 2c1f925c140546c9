"""Prometheus and promtool: from the cache, else the official download, else Debian's package.

`run` starts a server that scrapes one address and loads one file of rules.
"""

from __future__ import annotations

import contextlib
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from testbed.components import check, fetch, find_program, place, reachable, unpack_debian_packages
from testbed.paths import cache_dir
from testbed.shell import say

VERSION = "3.5.0"
"""Of the one that is downloaded; Debian's is older, and reads the same rules."""

PROGRAMS = ("prometheus", "promtool")
_URL = f"https://github.com/prometheus/prometheus/releases/download/v{VERSION}/prometheus-{VERSION}.linux-amd64.tar.gz"


def ensure() -> Path:
    """Return the folder with both programs; get them first if they are not in the cache.

    Raises:
        TestbedError: neither the download nor the package can be had.
    """
    folder = cache_dir() / f"prometheus-{VERSION}"
    missing = [name for name in PROGRAMS if not (folder / name).exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        say("getting Prometheus")
        if reachable("https://github.com/"):
            _download(folder)
        else:
            root = unpack_debian_packages("prometheus", {"bookworm": ("prometheus",)})
            for name in PROGRAMS:
                place(find_program(root, name, "usr/bin"), folder / name)
    return folder


def _download(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        archive = Path(name) / "prometheus.tar.gz"
        check(_URL, f"{_URL.rsplit('/', 1)[0]}/sha256sums.txt", fetch(_URL, archive))
        with tarfile.open(archive) as tar:
            tar.extractall(name, filter="data")
        for program in PROGRAMS:
            place(find_program(Path(name), program, f"prometheus-{VERSION}.linux-amd64"), folder / program)


@contextlib.contextmanager
def run(folder: Path, *, port: int, target: str, rules: Path, interval_seconds: int = 1) -> Iterator[str]:
    """Run a server; yield its URL, which answers a moment later.

    Args:
        folder: an empty folder for its data, configuration and log.
        port: of this machine, for the server.
        target: host and port of what is scraped.
        rules: file of rules and alerts.
        interval_seconds: between scrapes and between evaluations.
    """
    every = f"{interval_seconds}s"
    configuration = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "elastic-training-operator", "static_configs": [{"targets": [target]}]}],
    }
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    command = [str(ensure() / "prometheus"), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with open(folder / "prometheus.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)
