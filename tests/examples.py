"""Run the examples in docstrings, and find public names that have none."""

import doctest
from types import ModuleType


def run_examples(module: ModuleType) -> None:
    """Run all examples of a module; fail if one gives another result, or if there is none."""
    failed, attempted = doctest.testmod(module, verbose=False)
    assert attempted, f"{module.__name__} has no example"
    assert not failed, "see the captured output"


def callables_without_example(module: ModuleType) -> set[str]:
    """Return the names in `__all__` without an example in the docstring of the object or of one of its methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    return {name for name in module.__all__ if not any(test.examples for test in finder.find(getattr(module, name)))}
