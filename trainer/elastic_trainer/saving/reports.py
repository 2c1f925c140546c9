"""What the ranks of a node and their copy process tell each other and rank 0 about one save, as small files.

A rank writes a note into the staging folder when it has written its part of a save there. The copy process writes a
report below the attempt's folder on the checkpoint volume when the node's files are on stable storage. Names of reports
contain the token of their save, so that a report of an earlier save or process is never taken for one of this save.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.errors import SaveError
from reshard.commits.commit import CommittedFile
from reshard.storage.durable import replace_file

REPORTS = ".saves"
"""Folder of the reports, in the folder of the attempt."""

FILES = "files"
"""Folder of one save's staged files, in which the framework saves."""

_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """What a copy process has to do for one save.

    Attributes:
        staged: folder of the save on this node; its files are in FILES.
        target: folder of the attempt on the checkpoint volume.
        tag: name of the commit's folder.
        report: file to write the node's report to.
        node: global rank of the node's first process.
        local_ranks: number of processes of the node; each writes a note.
    """

    staged: Path
    target: Path
    tag: str
    report: Path
    node: int
    local_ranks: int

    @property
    def local_report(self) -> Path:
        """Return the node's own copy of the report; once it is there, nothing is copied any more."""
        return self.staged.with_name(f"{self.staged.name}.report")

    @property
    def done(self) -> Path:
        """Return the local report's name after everything about the save has been done."""
        return self.staged.with_name(f"{self.staged.name}.done")

    def to_json(self) -> str:
        """Encode as one line of JSON."""
        return json.dumps({name: str(value) for name, value in dataclasses.asdict(self).items()})

    @classmethod
    def from_json(cls, text: str) -> CopyOrder:
        """Decode the output of `to_json`."""
        value = json.loads(text)
        return cls(
            staged=Path(value["staged"]),
            target=Path(value["target"]),
            tag=value["tag"],
            report=Path(value["report"]),
            node=int(value["node"]),
            local_ranks=int(value["local_ranks"]),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node has written to the checkpoint volume for one save.

    Attributes:
        node: global rank of the node's first process.
        host: name of the node's machine or pod.
        files: files in the commit's folder, with their CRC-32.
        beside: files beside the commit's folder, relative to the attempt's folder (DeepSpeed's `latest`).
        error: why the node's part is not complete; empty if it is.
        seconds: time from the last rank's note to the report.
    """

    node: int
    host: str
    files: Sequence[CommittedFile] = ()
    beside: Sequence[str] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files in the commit's folder."""
        return sum(file.num_bytes for file in self.files)

    def write(self, path: Path) -> None:
        """Write the report to the checkpoint volume.

        Raises:
            OSError: it cannot be written.
        """
        value: dict[str, Any] = dataclasses.asdict(self)
        replace_file(path, json.dumps({"version": _VERSION, **value}).encode())


def read_report(path: Path) -> NodeReport | None:
    """Read a node's report; return None if there is none yet.

    Raises:
        SaveError: the file is no report.
    """
    try:
        value = json.loads(path.read_bytes())
        files = tuple(CommittedFile(**file) for file in value.pop("files"))
        if (version := value.pop("version")) != _VERSION:
            raise ValueError(f"version {version!r:.40}, expected {_VERSION}")
        return NodeReport(files=files, beside=tuple(value.pop("beside")), **value)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SaveError(f"{path} is no report of a node: {error!s:.200}; all nodes need one elastic_trainer") from error


def deliver(order: CopyOrder, report: NodeReport) -> None:
    """Report what a node has written: first on the node, then on the checkpoint volume.

    Rank 0 may publish the save as soon as the second report is there. If this process dies in between, the first one
    keeps the next process from writing into a published commit.

    Raises:
        OSError: a report cannot be written.
    """
    report.write(order.local_report)
    report.write(order.report)


def report_path(target: Path, token: str, node: int) -> Path:
    """Return the path of a node's report."""
    return target / REPORTS / f"{token}-{node}.json"


def merge(reports: Mapping[int, NodeReport]) -> list[CommittedFile]:
    """Return all files of a save, sorted by path.

    Raises:
        SaveError: a node has failed, or two nodes have written the same file.
    """
    failed = [f"{_name(report)}: {report.error}" for report in reports.values() if report.error]
    if failed:
        raise SaveError("; ".join(failed))
    writers: dict[str, list[str]] = collections.defaultdict(list)
    for _, report in sorted(reports.items()):
        for name in [*(file.path for file in report.files), *report.beside]:
            writers[name].append(_name(report))
    twice = [f"{name} was written by {' and by '.join(nodes)}" for name, nodes in writers.items() if len(nodes) > 1]
    if twice:
        raise SaveError(
            f"{len(twice)} files have two writers, expected one node for each: {'; '.join(sorted(twice)[:5])}; "
            "let one rank of all write each file"
        )
    return sorted((file for report in reports.values() for file in report.files), key=lambda file: file.path)


def _name(report: NodeReport) -> str:
    return f"the node of rank {report.node} ({report.host})"


def write_note(staged: Path, local_rank: int, error: str = "") -> None:
    """Say that a rank has written all its files of a save into the staging folder, or why it could not."""
    draft = staged / f".note-{local_rank}"
    draft.write_text(error, encoding="utf-8")
    draft.rename(staged / f"note-{local_rank}")


def read_notes(staged: Path, local_ranks: int) -> list[str] | None:
    """Return the errors of a node's ranks, empty texts for none; None if a rank has not written its note yet."""
    try:
        return [(staged / f"note-{rank}").read_text(encoding="utf-8") for rank in range(local_ranks)]
    except FileNotFoundError:
        return None
