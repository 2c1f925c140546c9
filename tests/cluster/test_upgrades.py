"""A job under two releases: the previous one, this one, and the previous one again after a rollback.

The API server and both operators are real; PlayedCluster plays the nodes and the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.apiserver import CRD
from elastic_operator.api.spec_model import SERVED_VERSIONS
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.resources import TRAINING_JOB
from elastic_operator.plugin.main import main as etj
from reshard.contract import GROUP, KIND, PLURAL
from testbed.components import bin_dir
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from tests.cluster.fault_harness import apiserver_with_kind, harnessed
from tests.cluster.played_cluster import NAME, SPEC, PlayedCluster
from tests.cluster.previous_release import PreviousRelease, unpack
from tests.cluster.recovery_lane import LIMITS, QUIET_SECONDS, SCENARIOS, Lane, OperatorProcess
from tests.pages import ROOT, Step, blocks, differs, section, steps
from tests.randomness import SOAKING

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server, pytest.mark.soak_only]

OLD, NEW = SERVED_VERSIONS
NODE_LOST, _, NODE_RETURNED, _ = SCENARIOS
QUIET, WRITTEN = "quiet", "written"
"""Jobs in the namespace `default`, which no operator serves; the test writes to one of them after the rollback."""

STORED_VERSIONS, MANAGED_FIELDS, REFRESH = range(3)
"""Commands of the page."""

KEPT = ("phase", "attempt", "current", "topology", "checkpoint", "recoveries", "failureCounts", "restartBudget")
"""Fields of the status that change with an attempt only."""

OBJECTS = "pods,jobs,leases,services,serviceaccounts,roles,rolebindings,poddisruptionbudgets"


PASS_SECONDS = LIMITS.resync_seconds + 0.5
"""Within this time the operator looks at every job that it knows; a minute or two later it also reads it again."""


class Releases:
    """Starts the operator of the installed release.

    Attributes:
        installed: the previous release; None for this checkout.
    """

    def __init__(self, token: str, folder: Path, installed: PreviousRelease | None) -> None:
        self._token = token
        self._folder = folder
        self.installed = installed
        self.operator: OperatorProcess | None = None

    def start(self, address: str) -> OperatorProcess:
        path = self.installed.python_path if self.installed else ()
        self.operator = OperatorProcess(address, self._token, self._folder, path)
        return self.operator


def manifest(version: str, name: str, namespace: str, *, team: str = "", **spec: Any) -> dict[str, Any]:
    labels = {"team": team} if team else {}
    meta = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": f"{GROUP}/{version}", "kind": KIND, "metadata": meta, "spec": {**SPEC, **spec}}


class User:
    """What people do with kubectl."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def apply(self, item: Mapping[str, Any], *options: str) -> None:
        self.kubectl("apply", "-f", "-", *options, stdin=yaml.safe_dump(dict(item)))

    def get(self, version: str, name: str, namespace: str) -> dict[str, Any]:
        arguments = (f"{PLURAL}.{version}.{GROUP}", name, "-n", namespace, "--show-managed-fields")
        return self.kubectl.get(*arguments)

    def managed_versions(self, name: str, namespace: str) -> set[str]:
        entries = self.get(OLD, name, namespace)["metadata"]["managedFields"]
        return {item["apiVersion"].rpartition("/")[2] for item in entries}

    def managers(self, name: str, namespace: str) -> list[Any]:
        """Return who owns which fields, in whatever version."""
        entries = self.get(OLD, name, namespace)["metadata"]["managedFields"]
        return [{key: value for key, value in item.items() if key != "apiVersion"} for item in entries]

    def refusal(self, item: Mapping[str, Any]) -> str:
        """Return why the API server refuses to apply an object on its side, empty if it does not."""
        try:
            self.apply(item, "--server-side", "--dry-run=server")
        except TestbedError as error:
            return str(error)
        return ""

    def stored_versions(self) -> list[str]:
        return list(self.kubectl.get("crd", f"{PLURAL}.{GROUP}")["status"]["storedVersions"])

    def follow(self, step: Step) -> str:
        """Run a command of a page in a shell."""
        path = f"{bin_dir()}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "KUBECONFIG": str(self.kubectl.kubeconfig)}
        command = ["bash", "-euo", "pipefail", "-c", step.command]
        return subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        ).stdout


class AppliedCluster(PlayedCluster):
    """A played cluster whose job a user applies."""

    def __init__(self, client: KubernetesClient, namespace: str, user: User) -> None:
        super().__init__(client, namespace)
        self._user = user
        self._operated = client

    async def create_job(self, spec: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self._user.apply, manifest(OLD, NAME, self.namespace))
        self.job = await self._operated.get(TRAINING_JOB, NAME, namespace=self.namespace)


class Story:
    """A running job, and the checks that nothing happens to it."""

    def __init__(self, user: User, lane: Lane, releases: Releases) -> None:
        self.user = user
        self.lane = lane
        self.releases = releases
        self.namespace = lane.cluster.namespace

    def read(self, version: str = OLD) -> dict[str, Any]:
        return self.user.get(version, NAME, self.namespace)

    def seen(self) -> dict[str, Any]:
        """Return what must stay as it is while the job only runs on."""
        job = self.read()
        items = self.user.kubectl.get(OBJECTS, "-n", self.namespace)["items"]
        status = {name: job["status"].get(name) for name in KEPT}
        return {
            "job": (job["metadata"]["uid"], job["metadata"]["generation"], job["spec"], status),
            **{f"{item['kind']} {item['metadata']['name']}": item for item in items},
        }

    @contextlib.asynccontextmanager
    async def undisturbed(self, *request: str) -> AsyncIterator[None]:
        """Check that nothing has happened to the job once the operator has looked at it again.

        Args:
            request: verb and resource of a request of the operator after which it has to look at the job.
        """
        before, view = await asyncio.to_thread(self.seen), self.lane.view
        view.arm(None)
        yield
        begin = None if request else time.monotonic()

        def has_looked() -> bool:
            nonlocal begin
            if begin is None and view.counts[request[0], request[1]] > 0:
                begin = time.monotonic()
            return begin is not None and time.monotonic() > begin + PASS_SECONDS and view.quiet_seconds > QUIET_SECONDS

        await self.lane.until(f"{' '.join(request) or 'a pass'} of the operator", has_looked)
        assert await asyncio.to_thread(self.seen) == before

    async def install(self, crd: Path, installed: PreviousRelease | None) -> None:
        """Replace CRD and operator as Helm does: the CRD first, so that the old operator sees it for a while."""
        # In two minutes the API server ends all watches of the kind; until then they go on. A soak waits for that.
        async with self.undisturbed(*(("open", PLURAL) if SOAKING else ())):
            await asyncio.to_thread(self.user.kubectl.apply_crd, crd)
        async with self.undisturbed("get" if SOAKING else "open", PLURAL):  # the new operator watches the kind
            self.releases.installed = installed
            self.lane.view.kill()
            self.lane.view.arm(None)  # the operator before may have opened its watch again
        assert await asyncio.to_thread(self.user.stored_versions) == [OLD], "another one would forbid a rollback"


def rollback_steps() -> list[Step]:
    """Commands of the page that can be run here."""
    text = section((ROOT / "docs/upgrades.md").read_text(encoding="utf-8"), "Roll back")
    runnable = (block for block in blocks(text) if block.language == "console" and block.marker != "not run")
    return [step for block in runnable for step in steps(block)]


def follow_the_page(user: User, number: int) -> None:
    """Run a command of the page, and compare what it prints."""
    step = rollback_steps()[number]
    printed = user.follow(step)
    assert not differs(step.output, printed), f"$ {step.command}\nprinted\n{printed}"


def check_both_versions(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the job can be read as either version, by kubectl and by the plugin."""
    old, new = story.read(OLD), story.read(NEW)
    assert (old.pop("apiVersion"), new.pop("apiVersion")) == (f"{GROUP}/{OLD}", f"{GROUP}/{NEW}")
    assert old == new
    assert old["status"]["phase"] == "Running"
    assert story.user.kubectl.get("etj", NAME, "-n", story.namespace)["apiVersion"] == f"{GROUP}/{NEW}"
    assert etj(["status", NAME, "-n", story.namespace, "--kubeconfig", str(story.user.kubectl.kubeconfig)], {}) == 0
    assert "Running" in capsys.readouterr().out


def apply_as_the_new_version(user: User) -> None:
    """Apply jobs as `v1beta1` that nobody will write to until the rollback."""
    for name in (QUIET, WRITTEN):
        user.apply(manifest(NEW, name, "default", team="one", suspend=True), "--server-side")


def prepare_a_rollback(story: Story) -> None:
    """Do what the page says before a rollback; it keeps the owners of all fields. Then write two jobs as `v1beta1`."""
    assert NEW in story.user.managed_versions(NAME, story.namespace)
    for command in (STORED_VERSIONS, MANAGED_FIELDS):
        before = story.user.managers(NAME, story.namespace)
        follow_the_page(story.user, command)
        assert story.user.managers(NAME, story.namespace) == before
    assert story.user.managed_versions(NAME, story.namespace) == {OLD}
    apply_as_the_new_version(story.user)


def check_what_a_rollback_breaks(user: User) -> None:
    """Check that only server-side apply fails of a job with managed fields in the version that is gone."""
    for name in (QUIET, WRITTEN):
        assert user.managed_versions(name, "default") == {NEW}
        assert "request to convert CR to an invalid group/version" in user.refusal(manifest(OLD, name, "default"))
    user.apply(manifest(OLD, WRITTEN, "default", team="two", suspend=True))
    patch = ("patch", f"{PLURAL}.{OLD}.{GROUP}", WRITTEN, "--type=merge", "-p")
    user.kubectl(*patch, json.dumps({"metadata": {"annotations": {"a": "b"}}}))
    user.kubectl(*patch, json.dumps({"status": {"phase": "Suspended"}}), "--subresource=status")
    job = user.get(OLD, WRITTEN, "default")
    assert (job["metadata"]["labels"]["team"], job["metadata"]["annotations"]["a"]) == ("two", "b")
    assert job["status"]["phase"] == "Suspended"


def check_the_remedy(user: User) -> None:
    """Check that the page's command replaces versions in managed fields, and changes nothing else."""
    before, managers = user.get(OLD, QUIET, "default"), user.managers(QUIET, "default")
    follow_the_page(user, MANAGED_FIELDS)
    after = user.get(OLD, QUIET, "default")
    assert user.managers(QUIET, "default") == managers
    assert user.managed_versions(QUIET, "default") == {OLD}
    for job in (before, after):
        del job["metadata"]["managedFields"], job["metadata"]["resourceVersion"]
    assert after == before
    assert user.refusal(manifest(OLD, WRITTEN, "default", team="two", suspend=True)) == ""


def check_server_side_apply(user: User, name: str, namespace: str, **spec: Any) -> None:
    """Check that a user changes and removes a field of a job without a conflict."""
    for team in ("other", ""):
        user.apply(manifest(OLD, name, namespace, team=team, **spec), "--server-side")
        assert user.get(OLD, name, namespace)["metadata"].get("labels", {}).get("team", "") == team


async def follow(
    user: User, token: str, folder: Path, previous: PreviousRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    releases = Releases(token, folder, previous)
    async with harnessed(user.kubectl.kubeconfig, releases.start, "upgrade") as harness:
        cluster = harness.cluster(lambda client, namespace: AppliedCluster(client, namespace, user))
        lane = Lane(harness.proxy, cluster, releases.start)
        async with lane.run():
            story = Story(user, lane, releases)
            await story.install(CRD, None)
            check_both_versions(story, capsys)
            await lane.recover(NODE_LOST, None)
            told = await asyncio.to_thread(user.kubectl, "events", "--for", f"etj/{NAME}", "-n", story.namespace)
            assert told.strip(), "this operator's Events are those of the version that kubectl prefers"
            for options in ((), ("--server-side",)):
                async with story.undisturbed():
                    await asyncio.to_thread(user.apply, manifest(NEW, NAME, story.namespace), *options)
            async with story.undisturbed():
                await asyncio.to_thread(prepare_a_rollback, story)
            await story.install(previous.crd, previous)
            await asyncio.to_thread(check_what_a_rollback_breaks, user)
            async with story.undisturbed():
                await asyncio.to_thread(check_the_remedy, user)
                await asyncio.to_thread(check_server_side_apply, user, NAME, story.namespace)
            await asyncio.to_thread(check_server_side_apply, user, QUIET, "default", suspend=True)
            await asyncio.to_thread(follow_the_page, user, REFRESH)
            assert user.kubectl.get("etj", NAME, "-n", story.namespace)["apiVersion"] == f"{GROUP}/{OLD}"
            await lane.recover(NODE_RETURNED, None)
    assert releases.operator is not None
    started = re.findall("^the operator of (.*)$", releases.operator.log.read_text(), flags=re.MULTILINE)
    assert [Path(path).is_relative_to(previous.folder) for path in started] == [True, False, True]


def test_an_upgrade_and_a_rollback_leave_a_running_job_alone_and_it_recovers_after_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    previous = unpack(tmp_path / "previous")
    with apiserver_with_kind(previous.crd) as (config, token):
        asyncio.run(follow(User(Kubectl(config)), token, tmp_path, previous, capsys))
