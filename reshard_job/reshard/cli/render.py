"""Render the results of the verbs as a JSON value and as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.contract import ReshardReport
from reshard.errors import ReshardError
from reshard.planning.plan import Plan
from reshard.system.limits import format_bytes
from reshard.tensors.layout import PADDING, Index

if TYPE_CHECKING:
    from reshard.cli.estimate import Estimate
    from reshard.cli.inspection import Inspection

_FIRST_OPTIONS = ("lr", "betas", "momentum", "eps", "weight_decay", "step")
_MOST_OPTIONS = 6


def inspect_value(inspection: Inspection) -> dict[str, Any]:
    """Return the JSON value of `reshard inspect`."""
    index, commit = inspection.index, inspection.commit
    value: dict[str, Any] = {
        "path": str(inspection.path),
        "format": inspection.format,
        "commit": {"state": inspection.committed},
        "files": inspection.num_files,
        "file_bytes": inspection.file_bytes,
        "problems": [
            {"kind": item.kind, "exit_code": int(item.exit_code), "message": item.message, "hint": item.hint}
            for item in inspection.problems
        ],
        "notes": list(inspection.notes),
    }
    if commit is not None:
        value["commit"] |= {
            "writer": commit.writer,
            "attempt": commit.attempt,
            "created": commit.created,
            "source": commit.source,
            "files": len(commit.files),
            "bytes": commit.num_bytes,
        }
    known = index or commit
    if known is not None:
        value |= {
            "step": known.step,
            "samples": known.samples,
            "topology": known.topology.to_dict(),
        }
    return value if index is None else value | _index_value(index)


def _index_value(index: Index) -> dict[str, Any]:
    copies, boxes = _counts(index)
    num_weights, num_elements = _weights(index)
    return {
        "weights": {"tensors": num_weights, "elements": num_elements},
        "states": {
            state: {"dtypes": dtypes, "tensors": count, "bytes": num_bytes}
            for state, (dtypes, count, num_bytes) in _states(index).items()
        },
        "groups": [
            {"names": list(group.names), "options": dict(group.options), "scalars": dict(group.scalars)}
            for group in index.groups
        ],
        "aliases": dict(index.aliases),
        "tensors": [
            {
                "state": tensor.key.state,
                "name": tensor.key.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "bytes": tensor.num_bytes,
                "copies": copies[at],
                "boxes": boxes[at],
            }
            for at, tensor in enumerate(index.tensors)
        ],
    }


def _states(index: Index) -> dict[str, tuple[list[str], int, int]]:
    """Return types, number of tensors and bytes of each state."""
    states: dict[str, tuple[list[str], int, int]] = {}
    for tensor in index.tensors:
        dtypes, count, num_bytes = states.get(tensor.key.state, ([], 0, 0))
        dtypes = sorted({*dtypes, tensor.dtype})
        states[tensor.key.state] = (dtypes, count + 1, num_bytes + tensor.num_bytes)
    return dict(sorted(states.items()))


def _weights(index: Index) -> tuple[int, int]:
    """Count the model's tensors and their elements; some exist only as master weights, some only as weights."""
    shapes = {
        tensor.key.name: tensor.num_elements
        for tensor in index.tensors
        if tensor.key.state in ("fp32", "weight") and not tensor.key.name.endswith(PADDING)
    }
    return len(shapes), sum(shapes.values())


def _counts(index: Index) -> tuple[list[int], list[int]]:
    """Count the copies and the boxes of every tensor."""
    copies = np.zeros(len(index.tensors), dtype=np.int64)
    np.maximum.at(copies, index.shards.tensor, index.shards.replica + 1)
    return copies.tolist(), index.shards.boxes_by_tensor(len(index.tensors)).tolist()


def inspect_lines(inspection: Inspection, *, tensors: bool) -> list[str]:
    """Return the text of `reshard inspect`."""
    index, commit = inspection.index, inspection.commit
    known = index or commit
    lines = [str(inspection.path), f"  format    {inspection.format or 'not recognised'}"]
    if known is not None:
        samples = f" ({known.samples} samples)" if known.samples else ""
        lines += [f"  topology  {known.topology}", f"  step      {known.step or '0, or not recorded'}{samples}"]
    lines += [
        f"  files     {inspection.num_files}, {format_bytes(inspection.file_bytes)}",
        f"  commit    {_commit_text(inspection)}",
    ]
    if index is not None:
        rows = [
            (state, ", ".join(dtypes), format_count(count, "tensor"), format_bytes(num_bytes))
            for state, (dtypes, count, num_bytes) in _states(index).items()
        ]
        count, num_elements = _weights(index)
        lines += [
            f"  weights   {format_count(count, 'tensor')}, {num_elements:,} element{'' if num_elements == 1 else 's'}"
        ]
        lines += [f"  state     {line}" for line in format_table(rows, right=(2, 3))] if rows else []
        lines += [f"  group {at:<3} {_group_text(index, at)}" for at in range(len(index.groups))]
        lines += [f"  tied      {alias} = {name}" for alias, name in index.aliases.items()]
        lines += _tensor_table(index) if tensors else []
    lines += [f"  note      {note}" for note in inspection.notes]
    for item in inspection.problems:
        lines += _problem_lines("problem", item.lines, int(item.exit_code), item.kind, item.hint)
    return lines


def _problem_lines(label: str, problem: Sequence[str], exit_code: int, kind: str, hint: str) -> list[str]:
    first, *others = (*problem, *([f"hint: {hint}"] if hint else []))
    return [f"  {label:<9} {kind} ({exit_code}): {first}", *(f"            {line}" for line in others)]


def _commit_text(inspection: Inspection) -> str:
    commit = inspection.commit
    if commit is None:
        return inspection.committed
    parts = [f"{inspection.committed}: by {commit.writer}, attempt {commit.attempt}"]
    parts += [f"at {commit.created}"] if commit.created else []
    parts += [f"from {commit.source}"] if commit.source else []
    return ", ".join(parts)


def _group_text(index: Index, at: int) -> str:
    group = index.groups[at]
    plain = {**group.options, **group.scalars}
    plain = {key: plain[key] for key in (*_FIRST_OPTIONS, *plain) if key in plain}
    shown = [f"{key} {value}" for key, value in plain.items() if isinstance(value, int | float | str | list | tuple)]
    more = [f"{len(plain) - _MOST_OPTIONS} more with --json"] if len(plain) > _MOST_OPTIONS else []
    return ", ".join([format_count(len(group.names), "parameter"), *shown[:_MOST_OPTIONS], *more])


def _tensor_table(index: Index) -> list[str]:
    copies, boxes = _counts(index)
    rows = [("tensor", "shape", "type", "bytes", "copies", "boxes")]
    rows += [
        (
            str(tensor.key),
            str(list(tensor.shape)),
            tensor.dtype,
            format_bytes(tensor.num_bytes),
            str(copies[at]),
            str(boxes[at]),
        )
        for at, tensor in enumerate(index.tensors)
    ]
    return ["  " + line for line in format_table(rows, right=(3, 4, 5))]


def format_count(count: int, what: str) -> str:
    """Return a count with its noun: `1 file`, `2 files`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def format_table(rows: Sequence[tuple[str, ...]], *, right: tuple[int, ...] = ()) -> list[str]:
    """Return the lines of a table; the columns in `right` are aligned to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(widths[at]) if at in right else cell.ljust(widths[at]) for at, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def plan_value(
    plan: Plan, estimated: Estimate, requests: tuple[int, int], mode: tuple[str, str], *, files: bool
) -> dict[str, Any]:
    """Return the JSON value of `reshard plan`; `mode` is the mode and the reason for it."""
    summary = plan.summary()
    return {
        **summary,
        "mode": mode[0],
        "mode_reason": mode[1],
        "read_requests": requests[0],
        "write_requests": requests[1],
        "estimate": estimated.to_dict(),
        **({"files": [{"path": file.path, "bytes": file.num_bytes} for file in plan.layout.files]} if files else {}),
    }


def manifest_value(
    plan: Plan, estimated: Estimate, sizes: Mapping[str, int], mode: tuple[str, str], *, files: bool
) -> dict[str, Any]:
    """Return the JSON value of `reshard plan --mode virtual`; `sizes` are those of the manifest's files."""
    value = plan_value(plan, estimated, (0, len(sizes)), mode, files=False)
    return {
        **value,
        "bytes_to_read": 0,
        "bytes_to_compare": 0,
        "bytes_to_load": plan.bytes_to_read,
        "bytes_to_write": sum(sizes.values()),
        "files_to_write": len(sizes),
        **({"files": [{"path": path, "bytes": size} for path, size in sizes.items()]} if files else {}),
    }


def plan_lines(value: Mapping[str, Any], estimated: Estimate) -> list[str]:
    """Return the text of `reshard plan`."""
    first, *rates = estimated.lines()
    lines = [
        f"{value['source']} (step {value['step']})",
        f"  {value['source_format']} {value['from']}  ->  {value['format']} {value['to']}",
        f"  mode      {value['mode']}: {value['mode_reason']}",
        f"  tensors   {value['tensors']}: {value['source_shards']} -> {value['target_shards']} boxes",
        *_moves(value),
        f"  time      {first}",
        *(f"            {rate}" for rate in rates),
        *(f"  note      {note}" for note in value["notes"]),
    ]
    if (free := value.get("target_free_bytes")) is not None:
        lines.append(f"  free      {format_bytes(free)} on the target's file system")
    if value.get("already_done"):
        lines.append("  done      the target is the result of this conversion already: run would change nothing")
    if (refused := value.get("refused")) is not None:
        reason = f"{refused['path']}: {refused['message']}" if refused["path"] else refused["message"]
        lines += _problem_lines("refused", [reason], refused["exit_code"], refused["kind"], refused["hint"])
    if "files" in value:
        lines += [f"  file      {item['path']}  {format_bytes(item['bytes'])}" for item in value["files"]]
    return [*lines, "  exact: every element of every copy is written once"]


def _moves(value: Mapping[str, Any]) -> list[str]:
    """Return the lines about what is read and written."""
    files = format_count(value["files_to_write"], "file")
    if "bytes_to_load" in value:
        return [
            "  read      nothing but metadata",
            f"  write     {format_bytes(value['bytes_to_write'])} in {files}: where the bytes are",
            f"  load      {format_bytes(value['bytes_to_load'])} of the source, by the ranks, when they load",
        ]
    requests = format_count(value["write_requests"], "request")
    return [
        f"  read      {format_bytes(value['bytes_to_read'])} in {format_count(value['read_requests'], 'request')}",
        f"  write     {format_bytes(value['bytes_to_write'])} in {files}, {requests}",
        f"  memory    {format_bytes(value['memory_bytes'])} of buffers, {format_count(value['threads'], 'thread')}",
    ]


def report_lines(report: ReshardReport) -> list[str]:
    """Return the text of `reshard run`."""
    rate = f", {format_bytes(report.bytes_read / report.seconds)}/s" if report.seconds and report.bytes_read else ""
    return [
        f"{report.target}: {report.message}",
        f"  read {format_bytes(report.bytes_read)}, wrote {format_bytes(report.bytes_written)}",
        f"  {format_count(report.num_files, 'file')}, {report.seconds:.2f} s{rate}",
        f"  digest {report.digest or '-'}, peak memory {format_bytes(report.peak_rss_bytes)}",
        *([f"  named in {report.latest}"] if report.latest else []),
    ]


def error_value(error: BaseException, exit_code: int, message: str) -> dict[str, Any]:
    """Return the JSON value of an error, for any verb."""
    known = error if isinstance(error, ReshardError) else None
    return {
        "kind": type(error).__name__,
        "exit_code": exit_code,
        "message": known.message if known else message,
        "path": known.path if known else None,
        "problems": list(known.problems) if known else [],
        "hint": known.hint if known else "",
    }
