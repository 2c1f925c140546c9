"""Whatever moment the test bed's launcher dies at, `down` leaves nothing. Runs before any cluster of the run is up."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed import cgroups, cluster, components
from testbed.errors import CannotRunHereError
from testbed.paths import BRIDGE, run_dir

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seconds", [0.4, 1.2, 2.5])
def test_nothing_is_left_after_a_crash_in_the_middle_of_up(seconds: float) -> None:
    try:
        cluster.check_machine()
    except CannotRunHereError as error:
        pytest.skip(str(error))
    if run_dir().exists():
        pytest.skip("a test bed is in use")
    components.ensure()
    process = subprocess.Popen([sys.executable, "-m", "testbed", "up"], cwd=ROOT, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    process.kill()
    process.wait()
    subprocess.run([sys.executable, "-m", "testbed", "down"], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    assert not run_dir().exists()
    assert not cgroups.exists()
    assert not Path(f"/sys/class/net/{BRIDGE}").exists()
    assert str(run_dir()) not in Path("/proc/self/mounts").read_text()
