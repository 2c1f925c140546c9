"""Which layer is on which stage. The expected cuts are what DeepSpeed 0.19.8 returned for the same input."""

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.pipeline import PipelineInfo, balanced, parse, stage_bounds, uniform

UNIFORM = [
    (7, 1, (0, 7)),
    (7, 2, (0, 4, 7)),
    (7, 3, (0, 3, 5, 7)),
    (9, 3, (0, 3, 6, 9)),
    (2, 4, (0, 1, 2, 2, 2)),
    (10, 4, (0, 3, 6, 8, 10)),
]
BALANCED = [
    ([100, 10, 10, 10, 1, 100], 2, (0, 3, 6)),
    ([100, 10, 10, 10, 1, 100], 3, (0, 1, 5, 6)),
    ([5, 5, 5, 5], 4, (0, 1, 2, 3, 4)),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, (0, 5, 7, 9)),
    ([0, 1, 1, 0, 1, 1, 0], 2, (0, 4, 7)),
    ([0, 0, 10, 0, 0], 2, (0, 4, 5)),
    ([3, 1], 4, (0, 1, 2, 2, 2)),
    ([7, 7, 7, 1, 1, 1, 20], 4, (0, 1, 2, 6, 7)),
]


@pytest.mark.parametrize(("items", "parts", "expected"), UNIFORM)
def test_uniform_is_deepspeeds_partition_uniform(items, parts, expected):
    assert uniform(items, parts) == expected


@pytest.mark.parametrize(("weights", "parts", "expected"), BALANCED)
def test_balanced_is_deepspeeds_partition_balanced(weights, parts, expected):
    assert balanced(weights, parts) == expected


def test_method_decides():
    info = PipelineInfo(num_layers=4, partition_method="uniform", layer_types=("Embedding", "Block", "Block", "Head"))
    elements = [100, 1, 1, 1]
    assert stage_bounds(info, 2, elements) == (0, 2, 4)
    by_size = PipelineInfo(num_layers=4, partition_method="parameters")
    assert stage_bounds(by_size, 2, elements) == (0, 1, 4)
    by_type = PipelineInfo(num_layers=4, partition_method="type:block", layer_types=info.layer_types)
    assert stage_bounds(by_type, 2, elements) == balanced([0, 1, 1, 0], 2)


@pytest.mark.parametrize("method", ["profile", "type:block"])
def test_unknown_method_or_missing_types_are_refused(method):
    with pytest.raises(UnsupportedError, match="partition method"):
        stage_bounds(PipelineInfo(num_layers=4, partition_method=method), 2, [1, 1, 1, 1])


def test_wire_form():
    found = parse({"num_layers": 4, "partition_method": "Uniform", "parts": [0, 4], "tied": {"embed": [0, 3]}})
    assert found == PipelineInfo(num_layers=4, partition_method="uniform", parts=(0, 4), tied={"embed": (0, 3)})
    assert parse(None) is None
    with pytest.raises(UnsupportedError, match="not understood"):
        parse({"tied": {}})
