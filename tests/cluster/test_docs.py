"""The documentation, done: commands of three pages in order, and every manifest on any page, on a real cluster.

A block under `<!-- not run: reason -->` is left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed import helm, storage
from testbed.paths import kubeconfig
from tests.page_commands import Shell, follow, text_of
from tests.pages import PAGES, ROOT, blocks

pytestmark = pytest.mark.cluster

RELEASE = "elastic-training-operator"
HOME = "elastic-training"
"""Release and namespace of the operator on all pages."""

CRD = "elastictrainingjobs.elastictraining.dev"


@pytest.fixture
def shell(testbed: Any) -> Shell:
    return Shell(kubeconfig())


@pytest.fixture
def clean(testbed: Any) -> Iterator[None]:
    """A cluster without operator, kind and job, before; afterwards the plain kind is there for other tests."""
    # The kind cannot go while a namespace that an earlier test has left is still being emptied of its jobs.
    testbed.wait(lambda: not leaving(testbed), what="the namespaces of earlier tests to go")
    remove(testbed)
    testbed.kubectl("delete", "crd", CRD, "--ignore-not-found")
    try:
        yield
    finally:
        remove(testbed)
        testbed.kubectl("delete", "crd", CRD, "--ignore-not-found")
        testbed.kubectl.apply_crd(ROOT / "crds/elastictrainingjobs.yaml")


def leaving(testbed: Any) -> list[str]:
    """Namespaces that are being deleted."""
    items = testbed.get("namespaces")["items"]
    return [item["metadata"]["name"] for item in items if item["status"]["phase"] == "Terminating"]


def remove(testbed: Any) -> None:
    for namespace in (HOME, "team-a-operator"):
        options = ("--ignore-not-found", "--wait", "--timeout=120s")
        helm.run("uninstall", RELEASE, *options, namespace=namespace, kubeconfig=testbed.kubeconfig)
    if testbed.get("crd", CRD):
        testbed.kubectl("delete", "etj", "gpt", "-n", "default", "--ignore-not-found")
    testbed.kubectl("delete", "pods", "--all", "-n", "default", "--grace-period=0", "--force", check=False)
    testbed.kubectl("delete", "pvc", "gpt-checkpoints", "-n", "default", "--ignore-not-found")
    testbed.kubectl("delete", "pv", "default-gpt-checkpoints", "--ignore-not-found")
    testbed.kubectl("delete", "namespace", HOME, "team-a", "team-a-operator", "--ignore-not-found")
    shutil.rmtree(storage.make_volume("default-gpt-checkpoints"), ignore_errors=True)


@pytest.mark.timeout(900)
def test_the_quickstart_works_as_written_and_so_do_the_commands_of_troubleshooting_on_its_job(
    clean: None, shell: Shell
) -> None:
    clean_up = text_of("quickstart.md").splitlines().index("## 6. Clean up")
    assert follow("quickstart.md", shell, end=clean_up) >= 15
    assert follow("troubleshooting.md", shell) >= 20
    assert follow("quickstart.md", shell, first=clean_up) >= 3


def test_the_installation_works_as_written(clean: None, shell: Shell) -> None:
    assert follow("install.md", shell) >= 15


def manifests() -> Iterator[Any]:
    """Kubernetes objects in YAML blocks."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "yaml" and block.marker != "not run":
                for item in yaml.safe_load_all(block.text):
                    if isinstance(item, dict) and {"apiVersion", "kind"} <= set(item):
                        yield pytest.param(item, id=f"{page.name}:{block.line}")


@pytest.mark.parametrize("manifest", list(manifests()))
def test_the_api_server_takes_every_manifest_of_a_page(
    manifest: dict[str, Any], cluster: Any, crd: None, namespace: str
) -> None:
    text = yaml.safe_dump(manifest)
    printed = cluster.kubectl("apply", "--server-side", "--dry-run=server", "-n", namespace, "-f", "-", stdin=text)
    assert "serverside-applied (server dry run)" in printed


def values() -> Iterator[Any]:
    """Blocks with values of the chart."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.marker == "values":
                yield pytest.param(block.text, id=f"{page.name}:{block.line}")


@pytest.mark.parametrize("text", list(values()))
def test_the_chart_takes_every_values_file_of_a_page(text: str, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    assert helm.run("template", "x", ROOT / "charts" / RELEASE, "--values", path)
