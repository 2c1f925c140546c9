"""Make virtual-<version>/: a manifest as written now. Run once per version: python -m tests.golden.make_virtual."""

import dataclasses
from pathlib import Path

from reshard.api import index_of, plan_of
from reshard.contract import MANIFEST_VERSIONS
from reshard.topology import Topology
from reshard.virtual.manifest import Manifest, encode
from reshard.virtual.ranks import files_by_rank
from tests.golden.files import golden


def main():
    index = dataclasses.replace(index_of(golden("zero3-dp3")), root=Path("/checkpoints/a1/step-00000002"))
    plan = plan_of(index, Topology.parse("dp=2,zero=3"), num_threads=1)
    folder = Path(__file__).parent / f"virtual-{MANIFEST_VERSIONS[-1]}"
    folder.mkdir(exist_ok=True)
    manifest = Manifest(
        plan=plan, fingerprint=plan.fingerprint, ranks=files_by_rank(plan.layout), source_commit=0x1234ABCD
    )
    for name, content in encode(manifest).items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
