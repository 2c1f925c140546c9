"""Copies the CRD into the chart, since Helm reads nothing outside of it: `python charts/sync.py`; a test compares."""

from __future__ import annotations

import shutil
from pathlib import Path

CHARTS = Path(__file__).parent
CRD = CHARTS.parent / "crds" / "elastictrainingjobs.yaml"
COPY = CHARTS / "elastic-training-operator" / "files" / CRD.name

if __name__ == "__main__":
    shutil.copyfile(CRD, COPY)
