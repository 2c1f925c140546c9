"""Entry points of `elastic-operator` and `kubectl-etj`: import the program, or say which extra it needs."""

from __future__ import annotations

from reshard.extras import extra_needed


def run_operator() -> int:
    """Run `elastic-operator`; return the exit code."""
    with extra_needed("elastic-operator", "operator"):
        from elastic_operator.main import main
    return main()


def run_plugin() -> int:
    """Run `kubectl-etj`; return the exit code."""
    with extra_needed("kubectl-etj", "plugin"):
        from elastic_operator.plugin.main import main
    return main()
