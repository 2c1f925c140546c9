"""What `spec.reshard.mode` asks of the resharder: Auto leaves it a choice where the training says it can load both."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Checkpoint, Commit, Current, Loader, Resume, Status
from elastic_operator.observed.observation import LeaseView, Observation
from elastic_operator.reconcile.actions import Create
from elastic_operator.reconcile.reshard_mode import conversion_request
from reshard.contract import MANIFEST_VERSIONS, LeaseKey, VirtualLoader
from reshard.topology import Topology
from reshard.virtual.auto_mode import Loader as ReshardLoader
from reshard.virtual.auto_mode import parse_loader
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    COMMIT,
    SPEC,
    WORLD,
    lease,
    look,
    lost_node,
    resharded,
    settled,
    training,
    worker_job,
    workers,
)

TOPOLOGY = Topology(dp=4)
CURRENT = Current(
    topology=TOPOLOGY,
    num_nodes=2,
    gpus_per_node=2,
    resume=Resume(uri="/c/a2/step-00000010", source="/c/a1/step-00000010", step=10, ready=False),
    spec_hash="abc",
)
SAID = Loader(manifests=MANIFEST_VERSIONS, memory_bytes=1 << 36, spec_hash="abc")
NONE = Checkpoint()
OWN = {"template": {"spec": {"containers": [{"name": "r", "image": "r:1"}]}}}
REFUSED = Checkpoint(
    history=(Commit(uri="/c/a2/x", step=10, samples=1, attempt=2, topology=TOPOLOGY, writer="reshard", invalid=True),)
)


def asked(reshard: dict[str, Any], loader: Loader | None = SAID, checkpoint: Checkpoint = NONE) -> Any:
    spec = parse_spec({**SPEC, "reshard": reshard})
    return conversion_request(spec, Status(loader=loader, checkpoint=checkpoint), CURRENT)


def test_auto_tells_the_resharder_who_will_load_it_and_leaves_it_the_choice() -> None:
    for reshard in ({}, {"mode": "Auto"}):
        option, text = asked(reshard).arguments
        assert option == "--loader"
        assert parse_loader(text) == ReshardLoader(ranks_per_node=2, memory_bytes=1 << 36)
        assert not asked(reshard).reason


@pytest.mark.parametrize(
    ("reshard", "changes", "reason"),
    [
        ({"mode": "Materialize"}, {}, "spec.reshard.mode is Materialize"),
        ({"parallelism": 2}, {}, "spec.reshard.parallelism shares them"),
        (OWN, {}, "may be older than the choice"),
        ({}, {"loader": None}, "no attempt has said yet"),
        ({}, {"loader": dataclasses.replace(SAID, spec_hash="abd")}, "no attempt of the edited spec"),
        ({}, {"loader": dataclasses.replace(SAID, manifests=(1,))}, "reads manifests of versions 1, the resharder"),
        ({}, {"loader": dataclasses.replace(SAID, manifests=())}, "reads manifests of versions"),
        ({}, {"checkpoint": REFUSED}, "could not be loaded"),
        ({"mode": "Virtual"}, {"checkpoint": REFUSED}, "could not be loaded"),
    ],
)
def test_files_are_written_where_it_is_not_known_to_be_loadable(
    reshard: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    found = asked(reshard, **changes)
    assert found.arguments == ()
    assert reason in found.reason


@pytest.mark.parametrize("loader", [None, SAID, dataclasses.replace(SAID, spec_hash="abd")])
def test_virtual_is_what_the_user_says(loader: Loader | None) -> None:
    assert asked({"mode": "Virtual"}, loader=loader).arguments == ("--mode", "virtual")
    assert asked({"mode": "Virtual", **OWN}, loader=loader).arguments == ("--mode", "virtual")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("{", None),
        ("[1]", None),
        ('{"manifests":[1]}', None),
        ('{"manifests":3,"memory_bytes":1}', None),
        ('{"manifests":["x"],"memory_bytes":1}', None),
        ('{"manifests":[1],"memory_bytes":null}', None),
        ('{"manifests":[1],"memory_bytes":7,"formats":"dcp"}', None),
        ('{"manifests":[1],"memory_bytes":7,"formats":[1]}', None),
        (
            '{"manifests":[1],"memory_bytes":7,"formats":["dcp"]}',
            VirtualLoader(manifests=(1,), memory_bytes=7, formats=("dcp",)),
        ),
        ('{"manifests":[1,3],"memory_bytes":7,"more":true}', VirtualLoader(manifests=(1, 3), memory_bytes=7)),
        (SAID_TEXT := VirtualLoader(manifests=(1, 2), memory_bytes=5).to_json(), VirtualLoader.from_json(SAID_TEXT)),
    ],
)
def test_what_a_lease_says_of_its_loader_is_read_or_left(text: str, found: VirtualLoader | None) -> None:
    assert LeaseView(name="l", attempt=1, annotations={LeaseKey.LOADER: text}).loader == found
    if text == SAID_TEXT:
        assert json.loads(text) == {"manifests": [1, 2], "memory_bytes": 5, "formats": []}


def test_a_job_whose_training_has_said_so_leaves_the_choice_and_keeps_the_reason() -> None:
    told = VirtualLoader(manifests=MANIFEST_VERSIONS, memory_bytes=1 << 36).to_json()
    status = settled()
    heard = look(status, dataclasses.replace(WORLD, leases=training(LOADER=told))).status
    assert heard.current is not None
    assert heard.loader == Loader(manifests=MANIFEST_VERSIONS, memory_bytes=1 << 36, spec_hash=heard.current.spec_hash)
    lost = look(heard, lost_node())
    (create,) = [action for action in lost.actions if isinstance(action, Create)]
    args = create.manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--loader") + 1].endswith(f",node-memory={1 << 36}")
    job, pod = resharded(mode="virtual", verified=False, mode_reason="about 3 s against 60 s")
    done = look(lost.status, Observation(nodes=lost_node().nodes, pods=(pod,), jobs=(job,))).status
    assert done.reshard is not None
    assert (done.reshard.mode, done.reshard.mode_reason) == ("virtual", "about 3 s against 60 s")
    assert done.loader == heard.loader, "the next attempt is of the same spec"


def test_a_job_whose_training_has_not_said_so_gets_files_and_the_reason_in_its_status() -> None:
    lost = look(settled(), lost_node())
    assert lost.status.reshard is not None
    assert lost.status.reshard.mode_reason.startswith("Auto writes files: no attempt has said yet")
    (create,) = [action for action in lost.actions if isinstance(action, Create)]
    assert "--loader" not in create.manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    job, pod = resharded()
    done = look(lost.status, Observation(nodes=lost_node().nodes, pods=(pod,), jobs=(job,))).status
    assert done.reshard is not None
    assert done.reshard.mode_reason == lost.status.reshard.mode_reason
    assert done.checkpoint.history[0].step == COMMIT.step


@pytest.mark.parametrize(
    ("mode", "verified", "reason", "steps", "again"),
    [
        ("virtual", False, "OOMKilled", "", False),
        ("virtual", False, "Error", "", True),
        ("virtual", False, "OOMKilled", "12", True),
        ("materialize", True, "OOMKilled", "", True),
    ],
)
def test_a_virtual_commit_that_memory_ran_out_for_is_not_tried_again(
    mode: str, verified: bool, reason: str, steps: str, again: bool
) -> None:
    lost = look(settled(), lost_node())
    job, pod = resharded(mode=mode, verified=verified)
    ready = look(lost.status, Observation(nodes=lost_node().nodes, pods=(pod,), jobs=(job,))).status
    assert ready.current is not None
    uri = ready.current.resume.uri
    leases = lease(2, PHASE="Restoring", **({"STEP": steps} if steps else {}))
    dead = dataclasses.replace(workers(2, count=1)[0], phase="Failed", exit_code=137, exit_reason=reason)
    world = Observation(
        nodes=lost_node().nodes, jobs=(worker_job(2),), leases=leases, pods=(dead, *workers(2, count=2)[1:])
    )
    if steps:  # it has loaded well
        ready = look(ready, dataclasses.replace(world, pods=workers(2, count=2))).status
    after = look(ready, world).status
    assert after.attempt == 3
    assert after.current is not None
    assert (after.current.resume.source == uri) == again
    assert next(item.invalid for item in after.checkpoint.history if item.uri == uri) != again
