"""Objects of an attempt: names, environment, claims, placement, ownership."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.api.spec import parse_spec, reshard_hash, spec_hash
from elastic_operator.api.status import Current, Resume
from elastic_operator.manifests.attempt import (
    JobRef,
    attempt_objects,
    checkpoint_root,
    commit_uri,
    reshard_job,
    training_job,
)
from elastic_operator.manifests.ports import rendezvous_port
from elastic_operator.manifests.reshard_pod import DEFAULT_RESOURCES
from reshard.cli import arguments, options
from reshard.contract import Env, Label
from reshard.topology import Topology

ROOT = Path(__file__).parents[4]
JOB = JobRef(name="gpt", namespace="team", uid="u-1", labels={"kueue.x-k8s.io/queue-name": "gpus", "team": "a"})
CURRENT = Current(
    topology=Topology(tp=2, dp=2),
    num_nodes=2,
    gpus_per_node=2,
    resume=Resume(uri="/checkpoint/gpt/a4/step-00000020", source="/checkpoint/gpt/a3/step-00000020", ready=False),
    avoid=("bad-1", "bad-2"),
)
SPEC: dict[str, Any] = {
    "accelerator": {"resource": "amd.com/gpu", "perNode": [2]},
    "nodes": {"min": 1, "max": 3},
    "batch": {"globalSamples": 20, "microSamples": 2},
    "checkpoint": {"claimName": "ckpt", "path": "gpt"},
    "template": {
        "metadata": {"labels": {"mine": "1"}},
        "spec": {
            "terminationGracePeriodSeconds": 7,
            "containers": [
                {
                    "name": "train",
                    "image": "trainer:1",
                    "command": ["torchrun", "train.py"],
                    "env": [{"name": "A", "value": "b"}, {"name": "ETJ_RESUME", "value": "mine"}],
                    "resources": {"limits": {"memory": "8Gi", "amd.com/gpu": "9"}, "requests": {"cpu": "4"}},
                },
                {"name": "sidecar", "image": "s:1"},
            ],
        },
    },
}


def spec(**template: Any) -> Any:
    value = copy.deepcopy(SPEC)
    value["template"]["spec"].update(template)
    return parse_spec(value)


def job(**template: Any) -> dict[str, Any]:
    return training_job(JOB, spec(**template), 4, CURRENT, 5.0)


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container["env"]}


def test_the_training_job_is_one_fixed_indexed_launch() -> None:
    found = job()
    assert found["metadata"]["name"] == "gpt-a4"
    assert {key: found["spec"][key] for key in ("completions", "parallelism", "completionMode", "backoffLimit")} == {
        "completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 0
    }  # fmt: skip
    pod = found["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"], pod["serviceAccountName"]) == ("Never", "gpt-a4", "gpt-a4")


def test_the_environment_names_rendezvous_topology_and_resume() -> None:
    found = environment(job()["spec"]["template"]["spec"]["containers"][0])
    assert found[Env.RESUME] == "/checkpoint/gpt/a4/step-00000020", "ours, whatever the template says"
    assert found["A"] == "b"
    assert found["PET_MASTER_ADDR"] == "gpt-a4-0.gpt-a4"
    assert (found["PET_NNODES"], found["PET_NPROC_PER_NODE"], found[Env.WORLD_SIZE]) == ("2", "2", "4")
    assert Topology.from_json(found[Env.TOPOLOGY]) == Topology(tp=2, dp=2)
    assert found[Env.CHECKPOINT_ROOT] == "/checkpoint/gpt"
    assert found[Env.GRACE_SECONDS] == "7"
    assert not any("VISIBLE_DEVICES" in name for name in found)


def test_accelerators_replace_what_the_template_asks_for_and_nothing_else() -> None:
    found = job()["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert found["limits"] == {"memory": "8Gi", "amd.com/gpu": "2"}
    assert found["requests"] == {"cpu": "4", "amd.com/gpu": "2"}


def test_the_claim_is_mounted_once_and_never_owned() -> None:
    pod = job()["spec"]["template"]["spec"]
    mounts = [item for item in pod["containers"][0]["volumeMounts"] if item["name"] != "etj-scratch"]
    assert mounts == [{"name": "etj-checkpoint", "mountPath": "/checkpoint"}]
    own = {
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "ckpt"}}],
        "containers": [{"name": "t", "image": "i", "volumeMounts": [{"name": "v", "mountPath": "/data/"}]}],
    }
    found = job(**own)["spec"]["template"]["spec"]
    assert [item["name"] for item in found["volumes"]] == ["v", "etj-scratch"]
    assert environment(found["containers"][0])[Env.CHECKPOINT_ROOT] == "/data/gpt"
    assert checkpoint_root(spec(**own)) == "/data/gpt"


def tolerated(resource: str) -> dict[str, str]:
    return {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    "terms", [None, [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchFields": []}]]
)
def test_avoided_nodes_are_kept_out_of_every_alternative(terms: Any) -> None:
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    found = job(**({"affinity": affinity} if terms else {}))["spec"]["template"]["spec"]["affinity"]
    result = found["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(result) == len(terms or [1])
    for term in result:
        assert [item["values"] for item in term["matchFields"]] == [["bad-1"], ["bad-2"]]
    if terms:
        assert result[0]["matchExpressions"] == terms[0]["matchExpressions"]


@pytest.mark.parametrize(
    ("own", "requests", "expected"),
    [
        pytest.param([], {}, [tolerated("amd.com/gpu")], id="accelerator"),
        pytest.param([], {"rdma/hca": "1"}, [tolerated("amd.com/gpu"), tolerated("rdma/hca")], id="other-resource"),
        pytest.param(
            [{"key": "spot", "operator": "Exists"}],
            {},
            [{"key": "spot", "operator": "Exists"}, tolerated("amd.com/gpu")],
            id="beside-the-users",
        ),
        pytest.param([tolerated("amd.com/gpu")], {}, [tolerated("amd.com/gpu")], id="once"),
        pytest.param([], {"cpu": "1", "hugepages-2Mi": "4Mi"}, [tolerated("amd.com/gpu")], id="no-built-in-resource"),
    ],
)
def test_training_pods_tolerate_the_taints_of_the_resources_that_they_request(
    own: list[Any], requests: dict[str, str], expected: list[Any]
) -> None:
    """As the admission plugin ExtendedResourceToleration does, where it is enabled."""
    containers = [{"name": "train", "image": "trainer:1", "resources": {"limits": requests}}]
    changes = {"containers": containers, **({"tolerations": own} if own else {})}
    assert job(**changes)["spec"]["template"]["spec"]["tolerations"] == expected
    pod = reshard_job(JOB, spec(**changes), 4, CURRENT)["spec"]["template"]["spec"]
    assert pod.get("tolerations", []) == own, "a reshard pod requests no accelerator"


def test_builders_leave_the_users_template_alone() -> None:
    parsed = spec()
    before = copy.deepcopy(parsed.template)
    training_job(JOB, parsed, 4, CURRENT, 5.0)
    reshard_job(JOB, parsed, 4, CURRENT)
    assert parsed.template == before


def test_everything_is_owned_labelled_and_in_order() -> None:
    found = attempt_objects(JOB, spec(), 4, CURRENT, 5.0)
    kinds = ["ServiceAccount", "Role", "RoleBinding", "Service", "Lease", "PodDisruptionBudget", "Job"]
    assert [item["kind"] for item in found] == kinds
    for item in found:
        meta = item["metadata"]
        assert meta["name"] == "gpt-a4"
        assert meta["ownerReferences"][0]["uid"] == "u-1"
        assert meta["labels"]["elastictraining.dev/attempt"] == "4"
    # Kueue would suspend a Job with this label; the job's own Workload asks for the quota.
    assert not any("kueue" in label for label in found[-1]["metadata"]["labels"])
    assert "team" not in found[-1]["metadata"]["labels"]


def test_the_budget_covers_all_training_pods_of_the_attempt_and_no_others() -> None:
    *_, budget, job_ = attempt_objects(JOB, spec(), 4, CURRENT, 5.0)
    assert budget["spec"]["minAvailable"] == CURRENT.num_nodes == job_["spec"]["completions"]
    assert "maxUnavailable" not in budget["spec"], "Kubernetes cannot compute it for pods of a Job"
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    assert wanted <= job_["spec"]["template"]["metadata"]["labels"].items()
    for other in (training_job(JOB, spec(), 5, CURRENT, 5.0), reshard_job(JOB, spec(), 4, CURRENT)):
        assert not wanted <= other["spec"]["template"]["metadata"]["labels"].items()


def test_the_budget_can_be_switched_off() -> None:
    parsed = parse_spec({**SPEC, "recovery": {"podDisruptionBudget": False}})
    found = attempt_objects(JOB, parsed, 4, CURRENT, 5.0)
    assert "PodDisruptionBudget" not in [item["kind"] for item in found]


def test_the_account_may_touch_its_own_lease_and_nothing_else() -> None:
    role = attempt_objects(JOB, spec(), 4, CURRENT, 5.0)[1]
    assert role["rules"] == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["gpt-a4"],
            "verbs": ["get", "patch"],
        }
    ]


def test_an_account_of_the_users_is_used_and_bound() -> None:
    found = attempt_objects(JOB, spec(serviceAccountName="mine"), 4, CURRENT, 5.0)
    assert found[0]["kind"] == "Role"
    assert found[1]["subjects"][0]["name"] == "mine"
    assert found[-1]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_the_reshard_pod_is_a_cpu_pod_made_from_the_training_pod() -> None:
    found = reshard_job(JOB, spec(nodeSelector={"gpu": "yes"}), 4, CURRENT)
    assert found["metadata"]["name"] == "gpt-a4-reshard"
    pod = found["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "trainer:1"
    assert container["resources"] == DEFAULT_RESOURCES
    assert "nodeSelector" not in pod
    assert pod["automountServiceAccountToken"] is False
    command = [*container["command"], *container["args"]]
    assert command[:4] == ["reshard", "run", CURRENT.resume.source, CURRENT.resume.uri]
    assert command[command.index("--to") + 1] == "tp=2,pp=1,dp=2,zero=1"
    assert command[command.index("--attempt") + 1] == "4"


@pytest.mark.parametrize(
    ("parallelism", "mode", "given"),
    [
        pytest.param(1, (), ["--resume"], id="files"),
        pytest.param(4, (), ["--worker"], id="shared-by-workers-that-keep-a-journal-anyway"),
        pytest.param(1, ("--mode", "virtual"), [], id="virtual-moves-no-bytes"),
        pytest.param(1, ("--loader", "elastic_trainer,ranks-per-node=2,node-memory=1"), [], id="maybe-virtual"),
    ],
)
def test_a_reshard_job_goes_on_with_what_an_earlier_try_has_left(
    parallelism: int, mode: tuple[str, ...], given: list[str]
) -> None:
    value = copy.deepcopy(SPEC)
    value["reshard"] = {"parallelism": parallelism}
    (container,) = reshard_job(JOB, parse_spec(value), 4, CURRENT, mode=mode)["spec"]["template"]["spec"]["containers"]
    assert [word for word in container["args"] if word in ("--resume", "--worker")] == given
    accepted = options.parse([word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in container["args"]])
    arguments.check(accepted)
    assert bool(accepted.resume) == ("--resume" in given), "the resharder takes these words together"


@pytest.mark.parametrize("mode", [(), ("--mode", "virtual")], ids=["files", "virtual"])
@pytest.mark.parametrize("external", [False, True], ids=["own-commit", "start-from"])
def test_every_conversion_gets_the_names_that_pickles_may_hold(mode: tuple[str, ...], external: bool) -> None:
    value = copy.deepcopy(SPEC)
    value["checkpoint"] |= {"allowedGlobals": ["mine.Progress", "__main__.State", "mine.Progress"]}
    current = dataclasses.replace(CURRENT, resume=dataclasses.replace(CURRENT.resume, external=external))
    found = reshard_job(JOB, parse_spec(value), 4, current, mode=mode)["spec"]["template"]["spec"]
    accepted = options.parse(found["containers"][0]["args"])
    arguments.check(accepted)
    assert accepted.allow_global == ["mine.Progress", "__main__.State"]


def test_allowed_names_are_part_of_a_conversion_and_not_of_an_attempt() -> None:
    plain = parse_spec(SPEC)
    allowed = parse_spec({**SPEC, "checkpoint": {**SPEC["checkpoint"], "allowedGlobals": ["mine.Progress"]}})
    empty = parse_spec({**SPEC, "checkpoint": {**SPEC["checkpoint"], "allowedGlobals": []}})
    assert spec_hash(allowed) == spec_hash(plain), "an edit restarts no training"
    assert reshard_hash(allowed) != reshard_hash(plain) == reshard_hash(empty)


def test_a_reshard_template_keeps_its_own_command() -> None:
    value = copy.deepcopy(SPEC)
    value["reshard"] = {
        "template": {"spec": {"containers": [{"name": "r", "image": "r:1", "command": ["/venv/bin/reshard"]}]}},
        "timeoutSeconds": 60,
    }
    found = reshard_job(JOB, parse_spec(value), 4, CURRENT)
    assert found["spec"]["activeDeadlineSeconds"] == 60
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["/venv/bin/reshard"]
    assert container["args"][0] == "run"
    assert container["volumeMounts"][0]["mountPath"] == "/checkpoint"


def test_reshard_pods_that_share_a_conversion_end_with_the_first_that_is_done() -> None:
    value = copy.deepcopy(SPEC)
    value["reshard"] = {"parallelism": 3}
    found = reshard_job(JOB, parse_spec(value), 4, CURRENT)["spec"]
    assert (found["completions"], found["parallelism"], found["completionMode"]) == (3, 3, "Indexed")
    assert found["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert (found["backoffLimitPerIndex"], found["maxFailedIndexes"]) == (0, 3), "one lost pod is not the end"
    args = found["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--worker") + 1] == "$(JOB_COMPLETION_INDEX)/3"
    assert "--worker" not in reshard_job(JOB, spec(), 4, CURRENT)["spec"]["template"]["spec"]["containers"][0]["args"]


def resharding(reshard: dict[str, Any], **container: Any) -> Any:
    value = copy.deepcopy(SPEC)
    value["reshard"] = reshard
    value["template"]["spec"]["containers"][0] |= container
    return parse_spec(value)


def test_the_resharder_gets_its_mode_and_is_then_one_pod() -> None:
    for asked in (("--mode", "virtual"), ("--loader", "elastic_trainer,ranks-per-node=2,node-memory=9")):
        job = reshard_job(JOB, resharding({"parallelism": 3}), 4, CURRENT, mode=asked)["spec"]
        args = job["template"]["spec"]["containers"][0]["args"]
        assert tuple(args[-2:]) == asked
        assert job.get("completions", 1) == 1
    (container,) = reshard_job(JOB, spec(), 4, CURRENT)["spec"]["template"]["spec"]["containers"]
    assert not {"--mode", "--loader"} & set(container["args"])


@pytest.mark.parametrize(
    ("reshard", "given"),
    [
        ({"mode": "Virtual"}, True),
        ({"mode": "Auto"}, True),
        ({}, True),
        ({"mode": "Materialize"}, False),
        ({"parallelism": 2}, False),
        ({"template": {"spec": {"containers": [{"name": "r", "image": "r:1"}]}}}, False),
        ({"mode": "Virtual", "template": {"spec": {"containers": [{"name": "r", "image": "r:1"}]}}}, True),
    ],
)
def test_the_training_gets_memory_for_what_it_may_read_virtually(reshard: dict[str, Any], given: bool) -> None:
    pod = training_job(JOB, resharding(reshard), 4, CURRENT, 5.0)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert (Env.SCRATCH in environment(container)) == given
    assert ({"name": "etj-scratch", "emptyDir": {"medium": "Memory"}} in pod["volumes"]) == given
    if given:
        mounts = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
        assert environment(container)[Env.SCRATCH] == mounts["etj-scratch"]


def test_a_scratch_folder_of_the_users_is_left_alone() -> None:
    given = [{"name": "ETJ_SCRATCH", "value": "/dev/shm"}]
    pod = training_job(JOB, resharding({"mode": "Virtual"}, env=given), 4, CURRENT, 5.0)["spec"]["template"]["spec"]
    assert environment(pod["containers"][0])[Env.SCRATCH] == "/dev/shm"
    assert "etj-scratch" not in {item["name"] for item in pod["volumes"]}


def test_the_schema_refuses_the_variables_that_the_operator_sets() -> None:
    crd = yaml.safe_load((ROOT / "crds/elastictrainingjobs.yaml").read_text(encoding="utf-8"))
    pod = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["template"]
    (rule,) = [
        item["rule"]
        for item in pod["properties"]["spec"]["x-kubernetes-validations"]
        if "sets a variable" in item["message"]
    ]
    set_always = set(environment(job()["spec"]["template"]["spec"]["containers"][0])) - {"A", Env.SCRATCH}
    assert set(re.findall(r"'([A-Z_]+)'", rule)) == set_always


def test_the_folder_of_a_commit_has_a_padded_step() -> None:
    assert commit_uri("/checkpoint/gpt", 3, 20) == "/checkpoint/gpt/a3/step-00000020"


def anti_affinity(found: dict[str, Any]) -> list[dict[str, Any]]:
    affinity = found["spec"]["template"]["spec"]["affinity"].get("podAntiAffinity", {})
    terms: list[dict[str, Any]] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    return terms


def test_pods_of_an_attempt_do_not_share_a_node_unless_the_spec_says_so() -> None:
    mine = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"mine": "1"}}}
    found = job(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [mine]}})
    first, second = anti_affinity(found)
    assert first == mine
    assert second["topologyKey"] == "kubernetes.io/hostname"
    labels = found["spec"]["template"]["metadata"]["labels"]
    selected = second["labelSelector"]["matchLabels"]
    assert selected.items() <= labels.items()
    assert Label.ATTEMPT in selected, "pods of the stopped attempt do not keep the new ones off their nodes"
    shared = copy.deepcopy(SPEC) | {"nodes": {"min": 1, "max": 3, "podsPerNode": "Many"}}
    assert anti_affinity(training_job(JOB, parse_spec(shared), 4, CURRENT, 5.0)) == []


def test_every_attempt_has_a_rendezvous_port_of_its_own_that_no_container_uses() -> None:
    ports = {rendezvous_port(uid, attempt, {}) for uid in ("u-1", "u-2") for attempt in range(1, 20)}
    assert len(ports) > 36
    assert all(20_000 <= port < 30_000 for port in ports)
    port = rendezvous_port("u-1", 4, {})
    taken = {"spec": {"containers": [{"ports": [{"containerPort": port}]}]}}
    assert rendezvous_port("u-1", 4, taken) == port + 1
    service = next(item for item in attempt_objects(JOB, spec(), 4, CURRENT, 5.0) if item["kind"] == "Service")
    found = environment(job()["spec"]["template"]["spec"]["containers"][0])
    assert found["MASTER_PORT"] == found["PET_MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
