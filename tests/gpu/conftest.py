"""Tests on one GPU (CUDA or ROCm): `make test-gpu`. They are skipped where torch sees none."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if not ours:
        return
    import torch

    if not torch.cuda.is_available():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that torch sees"))
