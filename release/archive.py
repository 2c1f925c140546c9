"""A chart package whose bytes only depend on the files: sorted, of one time and one owner, without a time in gzip."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import yaml


def pack_chart(chart: Path, target: Path, *, epoch: int) -> Path:
    """Write the package of a chart, as `helm package` would but for the times, into the folder `target`.

    Args:
        chart: folder of the chart.
        target: folder of the package.
        epoch: modification time of all files, seconds since the epoch.
    """
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    package = target / f"{about['name']}-{about['version']}.tgz"
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in list_chart_files(chart):
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"{about['name']}/{path.relative_to(chart).as_posix()}")
            entry.size, entry.mtime, entry.mode = len(data), epoch, 0o644
            archive.addfile(entry, io.BytesIO(data))
    with package.open("wb") as file, gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=epoch) as packed:
        packed.write(content.getvalue())
    return package


def list_chart_files(chart: Path) -> list[Path]:
    """Return the files of a chart without hidden ones, Chart.yaml first, which readers of packages look for."""
    files = [path for path in chart.rglob("*") if path.is_file()]
    shown = [path for path in files if not any(part.startswith(".") for part in path.relative_to(chart).parts)]
    return sorted(shown, key=lambda path: (path != chart / "Chart.yaml", path.relative_to(chart).as_posix()))
