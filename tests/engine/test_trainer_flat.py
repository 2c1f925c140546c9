"""The example as a plain module: ZeRO-3 and sequence parallelism, equal losses at every layout and after a reshard."""

import functools

import pytest

from reshard.api import reshard
from reshard.commits.commit import read_commit
from reshard.topology import Topology
from tests.engine.example_run import losses, run
from tests.randomness import some

pytestmark = pytest.mark.engine

FLAT = {"script": "train_flat.py"}
LAYOUTS = ("dp=1,zero=1", "dp=2,zero=3", "dp=2,cp=2,zero=1", "dp=4,cp=2,zero=3")
TOLERANCE = {"rel": 1e-6, "abs": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps at a layout, with a commit after the second; each layout runs once."""

    @functools.cache
    def train(layout):
        root = tmp_path_factory.mktemp("run")
        run(root, layout, "--steps", "4", "--save-every", "2", **FLAT)
        return root

    return train


@pytest.mark.parametrize("layout", some(LAYOUTS[1:], every=2))
def test_the_loss_is_the_same_at_every_layout(trained, layout):
    reference = losses(trained(LAYOUTS[0]))
    assert sorted(reference) == [1, 2, 3, 4]
    assert losses(trained(layout)) == pytest.approx(reference, **TOLERANCE)


@pytest.mark.parametrize(
    ("source", "target"), some([("dp=4,cp=2,zero=3", "dp=2,zero=3"), ("dp=2,zero=3", "dp=4,cp=2,zero=3")], every=2)
)
def test_it_goes_on_with_another_degree_of_sequence_parallelism(trained, tmp_path, source, target):
    root = trained(source)
    assert read_commit(root / "a1" / "step-00000002").topology == Topology.parse(source)
    reshard(root / "a1" / "step-00000002", tmp_path / "a2" / "step-00000002", target)
    resume = {"ETJ_ATTEMPT": "2", "ETJ_RESUME": str(tmp_path / "a2" / "step-00000002")}
    run(tmp_path, target, "--steps", "4", **resume, **FLAT)
    reference = losses(root)
    assert losses(tmp_path, attempt=2) == pytest.approx({step: reference[step] for step in (3, 4)}, **TOLERANCE)
