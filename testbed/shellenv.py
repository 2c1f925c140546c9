"""Make the environment in which a shell works with the test bed: `eval "$(python -m testbed env)"`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from testbed import helm
from testbed.components import bin_dir
from testbed.paths import cache_dir


def exports(kubeconfig: Path) -> str:
    """Shell text: credentials, and a PATH with this project's programs and the test bed's kubectl and helm.

    Args:
        kubeconfig: file with the credentials.

    Raises:
        TestbedError: there is no helm, and it can be neither downloaded nor built.
    """
    # In a shell that has evaluated this before, helm is found in the folder itself.
    folder = _linked({"kubectl": bin_dir() / "kubectl", "helm": helm.ensure().resolve()})
    programs = Path(sys.executable).parent
    return (
        f"export KUBECONFIG={shlex.quote(str(kubeconfig))}\n"
        f'export PATH={shlex.quote(str(programs))}:{shlex.quote(str(folder))}:"$PATH"\n'
    )


def command(*arguments: str) -> str:
    """Return the command with which a shell evaluates `exports`.

    Args:
        arguments: subcommands of `testbed` before `env`.
    """
    return f'eval "$({shlex.quote(sys.executable)} -m testbed {" ".join((*arguments, "env"))})"'


def _linked(programs: dict[str, Path]) -> Path:
    """A folder with these programs alone: the one that they come from also holds a kubelet and a container runtime."""
    folder = cache_dir() / "shell"
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in programs.items():
        draft = folder / f".{name}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        draft.replace(folder / name)
    return folder
