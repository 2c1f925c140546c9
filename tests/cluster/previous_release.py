"""The operator and the CRD of the previous release, from previous_release.tar.xz beside this file.

`python -m tests.cluster.previous_release COMMIT` writes that file from a commit or a tag of this repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import lzma
import subprocess
import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).with_name("previous_release.tar.xz")
_ROOT = Path(__file__).parents[2]
_CRD = "crds/elastictrainingjobs.yaml"
_PATHS = (
    _CRD,
    "operator/elastic_operator",
    ":(exclude)operator/elastic_operator/plugin",
    *(f"reshard_job/reshard/{name}.py" for name in ("__init__", "contract", "errors", "topology")),
)
"""What `elastic-operator run` imports, and the CRD."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreviousRelease:
    """The unpacked files.

    Attributes:
        folder: they are below it as in the repository.
        commit: the commit that they are from.
    """

    folder: Path
    commit: str

    @property
    def crd(self) -> Path:
        return self.folder / _CRD

    @property
    def python_path(self) -> tuple[Path, ...]:
        return (self.folder / "operator", self.folder / "reshard_job")


def unpack(folder: Path) -> PreviousRelease:
    """Unpack the archive into a new folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
        return PreviousRelease(folder, archive.pax_headers["comment"])  # `git archive` writes the commit there


def pack(commit: str) -> int:
    """Write the archive from a commit; return its size in bytes."""
    command = ["git", "archive", "--format=tar", f"{commit}^{{commit}}", "--", *_PATHS]
    made = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, check=True).stdout
    return ARCHIVE.write_bytes(lzma.compress(made, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write previous_release.tar.xz from a commit.")
    parser.add_argument("commit", help="commit or tag of the release")
    print(f"{ARCHIVE.relative_to(_ROOT)}: {pack(parser.parse_args().commit)} bytes")
