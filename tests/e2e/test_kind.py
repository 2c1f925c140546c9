"""The page on kind as written, and the demo on the same cluster, where nodes are containers of Docker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kind.cluster import KindCluster
from testbed.kind.paths import kubeconfig
from tests.page_commands import Shell, follow, text_of
from tests.pages import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

REASON = "needs kind"
REMOVAL = text_of("kind.md").splitlines().index("At the end, remove the cluster:")


@pytest.fixture(scope="module")
def no_cluster() -> Iterator[None]:
    """No cluster on kind before, and none afterwards."""
    if KindCluster().machines():
        pytest.fail("a cluster on kind is up already: `make testbed-down CLUSTER=kind` removes it")
    yield
    KindCluster().down()


def test_the_page_works_as_written(no_cluster: None) -> None:
    shell = Shell(kubeconfig())
    assert follow("kind.md", shell, end=REMOVAL, reason=REASON) >= 10


def test_the_demo_agrees_with_an_undisturbed_training_and_leaves_no_cluster(no_cluster: None, tmp_path: Path) -> None:
    options = ("--cluster", "kind", "--output", str(tmp_path / "output"), "--picture", str(tmp_path / "picture.png"))
    done = subprocess.run(
        [sys.executable, "-m", "demo", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((tmp_path / "output/report.json").read_text())
    assert report["ok"]
    assert len(report["topologies"]) >= 3
    assert not KindCluster().machines()
