"""Options of the whole suite. No fixture here starts anything by itself."""

import pytest

from tests import randomness

randomness.load_profile()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kubeconfig",
        default=None,
        help="run the cluster tier against this cluster instead of a test bed (tests that hurt nodes are skipped)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cheap tiers first: a mistake shows in seconds. Leave out `soak_only` tests, unless their file is named."""
    order = {"unit": 0, "property": 1, "golden": 2, "engine": 3, "cluster/test_testbed_crash": 4, "cluster": 5}
    items.sort(key=lambda item: next((rank for tier, rank in order.items() if f"/tests/{tier}" in str(item.path)), 0))
    if randomness.SOAKING:
        return
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    left_out = {item for item in items if item.get_closest_marker("soak_only") and item.path not in named}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
