"""Two runs of tests never share the test bed: the first to end would remove it under the other."""

import pytest

from testbed.cluster import reserved
from testbed.errors import TestbedError


def test_a_second_run_is_told_who_uses_the_test_bed(tmp_path, monkeypatch):
    monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path / "cache"))
    with reserved():
        number = (tmp_path / "cache/testbed-reservation").read_text()
        with pytest.raises(TestbedError, match=f"tests of process {number} use the test bed.*--kubeconfig"), reserved():
            pass
    with reserved():
        pass


def test_a_run_that_failed_leaves_no_reservation(tmp_path, monkeypatch):
    monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path))
    with pytest.raises(KeyError), reserved():
        raise KeyError
    with reserved():
        pass
