"""An operator that is told to end leaves at once: nothing is left that kopf would wait for."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from testbed.shell import until
from tests.cluster.own_api_server import own_api_server
from tests.cluster.test_plugin_pages import NAMESPACE, make_job

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server]

PROGRAM = """
import asyncio, sys
from kopf._cogs.aiokits import aiotasks
from elastic_operator.main import main

wait = aiotasks.wait

async def tell_and_wait(tasks, **options):
    if options.get("timeout") is not None:
        await asyncio.sleep(0.5)  # what ends by itself has ended then
        print("kopf waits for", [task.get_name() for task in tasks if not task.done()], flush=True)
    return await wait(tasks, **options)

aiotasks.wait = tell_and_wait
sys.exit(main())
"""
"""The operator; it prints for which tasks kopf gives a time at the end."""


@pytest.mark.parametrize(
    ("options", "holders"), [(["--no-leader-election"], []), (["--lease-namespace", NAMESPACE], [""])]
)
def test_nothing_goes_on_after_sigterm_that_kopf_would_wait_for(options: list[str], holders: list[str]) -> None:
    with own_api_server() as kubectl:
        kubectl("create", "namespace", NAMESPACE)
        make_job(kubectl)
        job = kubectl.get("etj", "gpt", "-n", NAMESPACE)
        meta = {"name": "waits", "namespace": NAMESPACE}
        kubectl.apply({"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": meta, "spec": job["spec"]})
        command = [sys.executable, "-c", PROGRAM, "run", "--kubeconfig", str(kubectl.kubeconfig)]
        command += [f"--namespace={NAMESPACE}", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as operator:
            try:
                until(
                    lambda: kubectl.get("etj", "waits", "-n", NAMESPACE).get("status", {}).get("phase"),
                    what="a pass of the job",
                )
                operator.send_signal(signal.SIGTERM)
                printed = operator.communicate(timeout=60)[0]
            finally:
                operator.kill()
        leases = kubectl.get("lease", "-n", NAMESPACE).get("items", [])
    assert set(printed.splitlines()) == {"kopf waits for []"}
    assert operator.returncode == 0
    assert [item["spec"].get("holderIdentity") or "" for item in leases] == holders, "the next leader need not wait"
