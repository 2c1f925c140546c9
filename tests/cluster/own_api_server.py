"""An API server of a test's own, beside the test bed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.apiserver import CRD, apiserver_with_crd
from testbed import components
from testbed.errors import CannotRunHereError
from testbed.kubectl import Kubectl


@contextlib.contextmanager
def own_api_server(*flags: str, crd: Path = CRD) -> Iterator[Kubectl]:
    """Start an API server with the kind ElasticTrainingJob, or skip the test where none can run."""
    with contextlib.ExitStack() as stack:
        try:
            kubectl = stack.enter_context(apiserver_with_crd(*flags, crd=crd))
        except CannotRunHereError as error:
            pytest.skip(str(error))
        yield kubectl


@contextlib.contextmanager
def daemon(folder: Path, program: str, config: Path, *flags: str) -> Iterator[None]:
    """Run a part of the control plane beside the API server; print the end of its log afterwards."""
    with open(folder / f"{program}.log", "wb") as log:
        command = [str(components.bin_dir() / program), f"--kubeconfig={config}", "--leader-elect=false", *flags]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command, "--secure-port=0"], stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.kill()
            process.wait(timeout=20)
            print((folder / f"{program}.log").read_text()[-3000:])
