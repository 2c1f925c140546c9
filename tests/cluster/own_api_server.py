"""An API server of a test's own, beside the test bed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.apiserver import CRD, apiserver_with_crd
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
