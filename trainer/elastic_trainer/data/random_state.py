"""Random number generators of a rank: python, numpy, torch on the CPU and on the device.

At the same topology a resumed rank continues with the states that the commit carries. At another topology the states
have no owner, and every rank seeds its generators with `seed_of`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any


def capture() -> dict[str, Any]:
    """Return the states of all generators of this process, in types that `torch.load(weights_only=True)` reads."""
    import numpy
    import torch

    version, words, gauss = random.getstate()
    name, keys, index, has_gauss, cached = numpy.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(index), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if (device := _device_module()) is not None:
        states["device"] = device.get_rng_state()
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set all generators of this process to the states that `capture` returned."""
    import numpy
    import torch

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    device = _device_module()
    if device is not None and "device" in states:
        device.set_rng_state(states["device"])


def seed_of(*, seed: int, step: int, replica: int, stage: int = 0, part: int = 0) -> int:
    """Return the seed of a rank that cannot continue with carried states: 63 bits of a SHA-256 of the arguments.

    Tensor parallel ranks of one replica get the same seed, because they drop the same elements of what they share.

    Args:
        seed: of the training.
        step: optimizer steps done.
        replica: number of the data parallel replica.
        stage: pipeline stage.
        part: number of the rank's part of the sequence, with context parallelism.

    >>> seed_of(seed=1, step=20, replica=0) != seed_of(seed=1, step=20, replica=1)
    True
    """
    digest = hashlib.sha256(f"{seed}/{step}/{replica}/{stage}/{part}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def reseed(seed: int) -> None:
    """Seed all generators of this process."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # the device's generators, too


def _device_module() -> Any:
    import torch

    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())
