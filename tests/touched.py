"""Run whole what a change touches: `python -m tests.touched [--base COMMIT]`, or `make test-touched`.

`TABLE` says which tests a change below a folder needs, besides the folder of `tests/unit` that mirrors it. All of them
run with ETJ_SOAK=1, because a defect may hide in the cases that `make test` leaves out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCTS = ("operator/elastic_operator", "reshard_job/reshard", "trainer/elastic_trainer")
ALWAYS = ("tests/unit/project", "tests/unit/docs")
"""Rules about the checkout: any change may break them, and they take seconds."""

_DECISIONS = (
    "tests/property/test_decide_*.py",
    "tests/property/test_flapping.py",
    "tests/property/test_*_world.py",
    "tests/property/test_pod_reports.py",
    "tests/property/test_world_finds_defects.py",
)
_PROTOCOL = ("tests/property/test_protocol_search.py",)
_CONVERSIONS = (
    "tests/golden",
    "tests/property/test_copies_mean.py",
    "tests/property/test_dcp_*.py",
    "tests/property/test_deepspeed_geometry.py",
    "tests/property/test_digest_mutations.py",
    "tests/property/test_fuzz_readers.py",
    "tests/property/test_names_rename.py",
    "tests/property/test_reshard_core.py",
    "tests/property/test_*_families.py",
    "tests/property/test_witness_mutants.py",
)
_DEEPSPEED = tuple(
    f"tests/engine/test_reshard_{name}.py"
    for name in (
        *("autotp", "described", "experts", "families", "latest", "models", "optimizers", "options", "partial"),
        *("pipeline_zero0", "sequence", "stages"),
    )
)
_MATRIX = ("tests/engine/test_reshard_matrix.py", "tests/engine/test_reshard_layouts.py")

_EXAMPLES = ("tests/engine/test_trainer_example.py", "tests/engine/test_stacks_*.py")

TABLE: Sequence[tuple[str, Sequence[str]]] = [
    ("operator/elastic_operator/api/", [*_DECISIONS, "tests/cluster/test_crd_admission.py"]),
    ("operator/elastic_operator/client/", ["tests/cluster/test_fault_injection.py"]),
    ("operator/elastic_operator/cluster/", [*_DECISIONS, "tests/cluster/test_fault_injection.py"]),
    ("operator/elastic_operator/controller.py", ["tests/cluster/test_fault_injection.py"]),
    ("operator/elastic_operator/manifests/", [*_DECISIONS, "tests/cluster/test_crd_admission.py"]),
    ("operator/elastic_operator/metrics/", ["tests/property/test_metrics_world.py", "tests/cluster/test_metrics.py"]),
    ("operator/elastic_operator/observed/", [*_DECISIONS, *_PROTOCOL]),
    ("operator/elastic_operator/planning/", [*_DECISIONS, "tests/property/test_planner_*.py", "tests/unit/simulation"]),
    ("operator/elastic_operator/plugin/", ["tests/cluster/test_plugin*.py"]),
    ("operator/elastic_operator/reconcile/", [*_DECISIONS, *_PROTOCOL]),
    ("operator/elastic_operator/web/", []),
    ("operator/elastic_operator/webhook/", ["tests/property/test_notifications_world.py"]),
    ("reshard_job/reshard/", _CONVERSIONS),
    ("reshard_job/reshard/checksums/", _MATRIX),
    ("reshard_job/reshard/cli/", []),
    ("reshard_job/reshard/commits/", _PROTOCOL),
    ("reshard_job/reshard/contract.py", [*_DECISIONS, *_PROTOCOL]),
    ("reshard_job/reshard/execution/", [*_MATRIX, "tests/engine/test_cast_torch.py"]),
    ("reshard_job/reshard/folders/", ["tests/engine/test_training_folders*.py"]),
    ("reshard_job/reshard/formats/dcp/", ["tests/engine/test_reshard_dcp*.py", "tests/engine/test_session_dcp.py"]),
    ("reshard_job/reshard/formats/deepspeed/", [*_MATRIX, *_DEEPSPEED]),
    ("reshard_job/reshard/formats/megatron/", ["tests/engine/test_reshard_megatron*.py"]),
    ("reshard_job/reshard/formats/pt/", ["tests/engine/test_pickled_names.py", "tests/engine/test_reshard_pt_*.py"]),
    ("reshard_job/reshard/formats/pytorch/", ["tests/engine/test_pytorch_weights.py"]),
    ("reshard_job/reshard/formats/safetensors/", ["tests/engine/test_reshard_safetensors*.py"]),
    ("reshard_job/reshard/formats/universal/", ["tests/engine/test_reshard_universal*.py"]),
    ("reshard_job/reshard/names/", ["tests/engine/test_reshard_safetensors.py", "tests/engine/test_reshard_tied.py"]),
    ("reshard_job/reshard/planning/", _MATRIX),
    ("reshard_job/reshard/profile/", []),
    ("reshard_job/reshard/storage/", ["tests/engine/test_reshard_s3.py"]),
    ("reshard_job/reshard/system/", []),
    ("reshard_job/reshard/tensors/", _MATRIX),
    ("reshard_job/reshard/topology.py", _DECISIONS),
    ("reshard_job/reshard/virtual/", ["tests/engine/test_reshard_virtual.py"]),
    ("reshard_job/reshard/witness/", _MATRIX),
    (
        "trainer/elastic_trainer/",
        [*_PROTOCOL, "tests/property/test_trainer_*.py", "tests/engine/test_trainer_*.py"],
    ),
    ("trainer/elastic_trainer/data/", ["tests/engine/test_stacks_streams.py"]),
    ("trainer/elastic_trainer/launch.py", ["tests/engine/test_launchers.py"]),
    ("trainer/elastic_trainer/saving/", ["tests/engine/test_stacks_dcp.py"]),
    ("trainer/elastic_trainer/stacks/", ["tests/engine/test_stack*.py", "tests/engine/test_session_dcp.py"]),
    (".github/", ["tests/unit/release"]),
    ("benchmarks/", ["tests/golden/test_benchmarks_virtual.py"]),
    ("canary/", ["tests/unit/canary"]),
    ("charts/", ["tests/cluster/test_helm_*.py"]),
    ("crds/", ["tests/cluster/test_crd_admission.py"]),
    ("demo/", ["tests/engine/test_lifecycle.py"]),
    ("docs/", ["tests/golden/test_readme.py", "tests/golden/test_tour.py"]),
    ("examples/", ["tests/unit/examples", *_EXAMPLES]),
    ("images/", []),
    ("krew/", ["tests/unit/elastic_operator/plugin/test_one_file.py"]),
    ("requirements.lock", ["tests/unit", "tests/golden", "tests/engine"]),
    ("release/", ["tests/unit/release"]),
    ("simulation/", ["tests/unit/simulation"]),
    ("testbed/", ["tests/unit/testbed", "tests/cluster/test_testbed*.py"]),
    ("tests/cluster/", []),
    ("tests/conftest.py", ["tests/unit", "tests/property", "tests/golden"]),
    ("tests/e2e/", []),
    ("tests/engine/", _MATRIX),
    ("tests/fuzz/", ["tests/property/test_fuzz_readers.py"]),
    ("tests/golden/", ["tests/golden"]),
    ("tests/gpu/", []),
    ("tests/property/cluster_model/", _DECISIONS),
    ("tests/property/protocol/", _PROTOCOL),
    ("tests/property/witness_mutants.py", ["tests/property/test_witness_mutants.py"]),
    ("tests/randomness.py", ["tests/unit", "tests/property", "tests/golden"]),
    ("tests/unit/", []),
]  # fmt: skip
"""Every row whose prefix begins a changed path counts; the patterns are of files and folders in the checkout."""


def changed_paths(base: str, root: Path = ROOT) -> list[str]:
    """Return the paths that differ from a commit: committed since, not committed, or not even added."""
    differing = _git(root, "diff", "--name-only", "--no-renames", base)
    return sorted({*differing, *_git(root, "ls-files", "--others", "--exclude-standard")})


def find_base(root: Path = ROOT) -> str:
    """Return the commit where this branch left the upstream or main; on main itself the commit before the last."""
    (head,) = _git(root, "rev-parse", "HEAD")
    for branch in ("@{upstream}", "origin/main", "main"):
        found = _git(root, "merge-base", "HEAD", branch, check=False)
        if found and found[0] != head:
            return found[0]
    return "HEAD~1"


def select(paths: Iterable[str]) -> list[str]:
    """Return the tests that changes of these paths need, as files and folders, none inside of another."""
    found = {*ALWAYS}
    for path in paths:
        found |= {*_mirror(path)}
        found |= {name for prefix, patterns in TABLE if path.startswith(prefix) for name in expand(patterns)}
    return sorted(name for name in found if not any(str(parent) in found for parent in Path(name).parents))


def expand(patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        yield from (str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def _mirror(path: str) -> Iterator[str]:
    """The folder of `tests/unit` for a module of a product, and a file of tests for itself."""
    name = Path(path)
    if name.parts[0] == "tests" and name.name.startswith("test_") and (ROOT / name).exists():
        yield path
    for product in PRODUCTS:
        if path.startswith(f"{product}/"):
            below = Path("tests/unit", *name.parts[1:-1])
            yield str(next(folder for folder in (below, *below.parents) if (ROOT / folder).is_dir()))


SHARED = ("unit", "property", "golden")
"""Tiers whose tests share the processors among workers."""


def commands(tests: Sequence[str]) -> list[list[str]]:
    """Return one command for the tiers in `SHARED`, and one for each other tier."""
    tiers = [
        ("pytest", "-n", "auto", *(f"tests/{name}" for name in SHARED)),
        *(("pytest", f"tests/{name}") for name in ("engine", "cluster", "e2e", "gpu")),
    ]
    found = []
    for command in tiers:
        options = [word for word in command if not word.startswith("tests/")]
        folders = [word for word in command if word.startswith("tests/")]
        chosen = [name for name in tests if any(Path(name).is_relative_to(folder) for folder in folders)]
        if chosen:
            found.append([sys.executable, "-m", *options, *chosen])
    return found


def run(todo: Iterable[Sequence[str]]) -> int:
    """Run all commands; return the exit code of the first one that failed."""
    codes = []
    for command in todo:
        print(f"ETJ_SOAK=1 {shlex.join(command)}", flush=True)
        codes.append(subprocess.run(command, cwd=ROOT, env={**os.environ, "ETJ_SOAK": "1"}, check=False).returncode)
    return next((code for code in codes if code), 0)


def _git(root: Path, *arguments: str, check: bool = True) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode and check:
        raise SystemExit(f"touched: git {shlex.join(arguments)} failed: {done.stderr.strip()}")
    return [] if done.returncode else done.stdout.splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.touched", description=__doc__)
    parser.add_argument("--base", help="commit to compare with (default: where this branch left upstream or main)")
    options = parser.parse_args(arguments)
    base = options.base or find_base()
    paths = changed_paths(base)
    print(f"touched: {len(paths)} files differ from {base}")
    return run(commands(select(paths)))


if __name__ == "__main__":
    raise SystemExit(main())
