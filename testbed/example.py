"""The example's job for the test bed: `python -m testbed example | kubectl apply -f -`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from testbed import podenv, storage
from testbed.provider import Provider

EXAMPLE = Path(__file__).parents[1] / "examples/gpt_deepspeed/job.yaml"
COMMIT_SECONDS = 15
GROW_SECONDS = 10


def objects(namespace: str, provider: Provider) -> list[dict[str, Any]]:
    """Volume, claim and job of examples/gpt_deepspeed/job.yaml.

    What differs from the file: the volume is a folder of this machine, the pods run this machine's torch and DeepSpeed,
    and commits and growth come sooner, so that nobody has to wait to see them.
    """
    documents = list(yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8")))
    (job,) = (item for item in documents if item["kind"] == "ElasticTrainingJob")
    job["metadata"]["namespace"] = namespace
    spec = job["spec"]
    claim = spec["checkpoint"]["claimName"]
    spec["checkpoint"]["intervalSeconds"] = COMMIT_SECONDS
    spec["recovery"] = {"scaleUpStableSeconds": GROW_SECONDS}
    spec["template"] = podenv.host_python(spec["template"], machine=provider.on_node(Path("/")))
    container = spec["template"]["spec"]["containers"][0]
    container["args"][0] = str(EXAMPLE.with_name("train.py"))
    folder = provider.on_node(provider.make_volume(f"{namespace}-{claim}"))
    return [*storage.claim(namespace, claim, folder), job]
