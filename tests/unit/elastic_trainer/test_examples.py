"""The examples in docstrings of the public API give the results that they show."""

import doctest

from elastic_trainer import batch


def test_the_examples_of_the_batch_arithmetic_are_right() -> None:
    assert doctest.testmod(batch) == (0, 2)
