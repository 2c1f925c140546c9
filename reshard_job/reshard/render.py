"""What the commands print: the same facts as a JSON value and as text for people. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from reshard.contract import ReshardReport
from reshard.layout import Index
from reshard.limits import format_bytes


def inspect_text(index: Index) -> tuple[dict[str, Any], str]:
    """For `reshard inspect`."""
    num_bytes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for tensor in index.tensors:
        count[f"{tensor.key.state} ({tensor.dtype})"] += 1
        num_bytes[f"{tensor.key.state} ({tensor.dtype})"] += tensor.num_bytes
    value = {
        "path": str(index.root),
        "format": index.format,
        "step": index.step,
        "samples": index.samples,
        "topology": index.topology.to_dict(),
        "files": len(index.files),
        "file_bytes": sum(file.num_bytes for file in index.files),
        "states": {state: {"tensors": count[state], "bytes": num_bytes[state]} for state in sorted(count)},
        "tensors": [
            {"state": tensor.key.state, "name": tensor.key.name, "shape": list(tensor.shape), "dtype": tensor.dtype}
            for tensor in index.tensors
        ],
    }
    lines = [
        f"{index.root}",
        f"  format    {index.format}",
        f"  topology  {index.topology}",
        f"  step      {index.step} ({index.samples} samples)",
        f"  files     {len(index.files)}, {format_bytes(sum(file.num_bytes for file in index.files))}",
        *(f"  {state:<24} {count[state]:>6} tensors {format_bytes(num_bytes[state]):>12}" for state in sorted(count)),
    ]
    return value, "\n".join(lines)


def plan_text(summary: dict[str, Any]) -> str:
    """For `reshard plan`."""
    return "\n".join(
        (
            f"{summary['source']} (step {summary['step']})",
            f"  {summary['from']}  ->  {summary['to']}",
            f"  tensors   {summary['tensors']}: {summary['source_shards']} shards -> {summary['target_shards']} shards",
            f"  read      {format_bytes(summary['bytes_to_read'])}",
            f"  write     {format_bytes(summary['bytes_to_write'])} in {summary['files_to_write']} files",
            f"  memory    {format_bytes(summary['memory_bytes'])} of buffers, {summary['threads']} threads",
            *(f"  note      {note}" for note in summary["notes"]),
            "  exact: every element of every copy is written once",
        )
    )


def report_text(report: ReshardReport) -> str:
    """For `reshard run`."""
    moved = report.bytes_read + report.bytes_written
    rate = f", {format_bytes(moved / report.seconds)}/s" if report.seconds and moved else ""
    return "\n".join(
        (
            f"{report.target}: {report.message}",
            f"  read {format_bytes(report.bytes_read)}, wrote {format_bytes(report.bytes_written)}",
            f"  {report.num_files} files, {report.seconds:.2f} s{rate}",
            f"  digest {report.digest or '-'}, peak memory {format_bytes(report.peak_rss_bytes)}",
        )
    )
