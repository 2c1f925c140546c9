"""What is there where one extra and nothing else is installed: every module of its package, and every program."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from testbed.paths import cache_dir

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGES = {
    "elastic_trainer": ("trainer", "trainer"),
    "reshard": ("reshard_job", "reshard"),
    "elastic_operator": ("operator", "operator"),
}
"""Folder and extra of each package."""

IMPORT_ALL = '''
import ast, importlib, importlib.machinery, pathlib, sys
package, sources, site, allowed = sys.argv[1], sys.argv[2].split(":"), sys.argv[3], set(sys.argv[4].split(","))
own = {"elastic_trainer", "reshard", "elastic_operator"}

class Installed(importlib.machinery.PathFinder):
    """Find what would be installed: the standard library, this project, and `allowed`."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        # The module with the build's configuration has the platform in its name and is not on the list.
        is_standard = top in sys.stdlib_module_names or top.startswith("_sysconfigdata_")
        installed = is_standard or top in allowed | own
        return super().find_spec(name, path, target) if installed else None

sys.meta_path = [Installed if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
sys.path += [*sources, site]
folder = next(pathlib.Path(source) for source in sources if (pathlib.Path(source) / package).is_dir())
wanted = set()
for path in sorted((folder / package).rglob("*.py")):
    name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
    wanted.add(name)
    # What functions import when they are called counts as well, but for what the user brings along.
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in own:
            wanted.add(node.module)
for name in sorted(wanted):
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(wanted))
'''


def closure(requirements: list[str]) -> set[str]:
    """Return the names of the distributions that these requirements bring along here."""
    found: set[str] = set()
    todo = [(Requirement(text), "") for text in requirements]
    seen = set()
    while todo:
        wanted, extra = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(wanted.name)
        found.add(name)
        for chosen in {"", *wanted.extras} - {one for known, one in seen if known == name}:
            seen.add((name, chosen))
            todo += [(Requirement(text), chosen) for text in importlib.metadata.requires(name) or ()]
    return found


def modules_of(distributions: set[str]) -> set[str]:
    by_module = importlib.metadata.packages_distributions()
    return {
        module for module, names in by_module.items() if {canonicalize_name(name) for name in names} & distributions
    }


def import_all(package: str, extra: list[str]) -> subprocess.CompletedProcess[str]:
    sources = ":".join(str(ROOT / folder) for folder, _ in PACKAGES.values())
    site = str(Path(pytest.__file__).parents[1])
    arguments = [package, sources, site, ",".join(modules_of(closure(extra)))]
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", IMPORT_ALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_of_a_package_imports_with_its_own_extra_alone(package):
    done = import_all(package, EXTRAS[PACKAGES[package][1]])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(list((ROOT / PACKAGES[package][0] / package).rglob("*.py"))) - 2


def test_a_dependency_that_the_extra_does_not_name_is_noticed():
    extra = [item for item in EXTRAS["trainer"] if not item.startswith("isal")]
    assert "No module named 'isal" in import_all("elastic_trainer", extra).stderr


PROGRAMS = {"elastic-operator": "operator", "kubectl-etj": "plugin", "reshard": "reshard"}
"""The extra that each program says it needs, and which is enough for it."""
WITH_TORCH = ("engine", "megatron", "streams")
ENVIRONMENTS = [
    pytest.param(extra, marks=pytest.mark.soak_only if extra in WITH_TORCH else ()) for extra in ("", *EXTRAS)
]
IMPORT_PLUGIN = """
import importlib, pkgutil, elastic_operator.plugin as plugin
for module in pkgutil.walk_packages(plugin.__path__, "elastic_operator.plugin."):
    importlib.import_module(module.name)
"""


def uv(*arguments: str | Path, env: Path | None = None) -> None:
    found = sorted(cache_dir().glob("uv-*/bin/uv"))
    if not found:
        pytest.skip("`make setup` has not installed uv on this machine")
    command = [str(found[-1]), *map(str, arguments)]
    environment = {**os.environ, **({"VIRTUAL_ENV": str(env)} if env else {})}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "-q", "--wheel", "--offline", "--out-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("extra", ENVIRONMENTS)
def test_every_program_prints_its_help_or_names_the_extra_that_it_needs(
    tmp_path: Path, wheel: Path, extra: str
) -> None:
    env = tmp_path / "env"
    uv("venv", "-q", "--python", sys.executable, env)
    name = f"{PROJECT['name']}[{extra}]" if extra else PROJECT["name"]
    uv("pip", "install", "-q", "--offline", "-c", "requirements.lock", f"{name} @ {wheel.as_uri()}", env=env)
    assert set(PROJECT["scripts"]) == set(PROGRAMS)
    for program, needed in PROGRAMS.items():
        done = subprocess.run(
            [env / "bin" / program, "--help"], capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode == 0:
            assert done.stdout.startswith(f"usage: {program}".replace("kubectl-etj", "kubectl etj")), done.stdout
            assert not done.stderr
        else:
            assert extra != needed, done.stderr
            assert done.returncode == 2
            (sentence,) = done.stderr.splitlines()
            assert sentence.startswith(f"{program}: expected the packages of the extra [{needed}], found no ")
    if extra == "plugin":
        subprocess.run([env / "bin" / "python", "-c", IMPORT_PLUGIN], check=True, timeout=60)
