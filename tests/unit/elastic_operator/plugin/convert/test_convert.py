"""`kubectl etj convert`: what is taken over, what is noted, what is refused, and that the result is valid."""

from __future__ import annotations

import copy
import doctest
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import parse_spec
from elastic_operator.plugin.convert import launcher
from elastic_operator.plugin.convert.documents import read_documents
from elastic_operator.plugin.convert.job import Choices, convert
from elastic_operator.plugin.convert.launcher import remove_launch_options
from elastic_operator.plugin.convert.section import ConvertError
from elastic_operator.plugin.errors import Exit
from elastic_operator.plugin.main import main
from reshard.contract import GROUP, VERSION
from tests.randomness import examples
from tests.unit.elastic_operator.api.test_crd import STRICT

CHOICES = Choices(global_samples=512)
SCHEMA = jsonschema.Draft202012Validator(STRICT)
TRAINER = "trainer.kubeflow.org/v1alpha1"


def pod(container: str = "pytorch", **more: Any) -> dict[str, Any]:
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": "registry.example.com/train:1",
                    "command": ["torchrun", "--nnodes=4", "/app/train.py"],
                    "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "400Gi"}},
                    "volumeMounts": [{"name": "ckpt", "mountPath": "/ckpt"}],
                    **more,
                }
            ],
            "volumes": [{"name": "ckpt", "persistentVolumeClaim": {"claimName": "checkpoints"}}],
        }
    }


def pytorchjob(template: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    group = {"restartPolicy": "OnFailure", "template": template or pod()}
    replicas = {"Master": {"replicas": 1, **group}, "Worker": {"replicas": 3, **copy.deepcopy(group)}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "llama", "namespace": "ml", "labels": {"kueue.x-k8s.io/queue-name": "team"}},
        "spec": {"pytorchReplicaSpecs": replicas, **spec},
    }


def jobset(*counts: int, **spec: Any) -> dict[str, Any]:
    jobs = [
        {
            "name": f"w{index}",
            "replicas": 2,
            "template": {"spec": {"parallelism": count, "completions": count, "template": pod("main")}},
        }
        for index, count in enumerate(counts)
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "llama"},
        "spec": {"replicatedJobs": jobs, **spec},
    }


def trainjob(**trainer: Any) -> dict[str, Any]:
    return {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": {"name": "llama"},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }


def runtime(**policy: Any) -> dict[str, Any]:
    job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": pod("node", env=[{"name": "A", "value": "runtime"}, {"name": "B", "value": "b"}])},
        },
    }
    return {
        "apiVersion": TRAINER,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "torch-distributed"},
        "spec": {
            "mlPolicy": {"numNodes": 2, "torch": {"numProcPerNode": "auto"}, **policy},
            "template": {"spec": {"replicatedJobs": [job]}},
        },
    }


def spec_of(*objects: dict[str, Any], choices: Choices = CHOICES) -> dict[str, Any]:
    """Convert, and check the result as API server and operator do."""
    job, _ = convert(objects, choices)
    assert job["apiVersion"] == f"{GROUP}/{VERSION}"
    SCHEMA.validate(job)
    parse_spec(job["spec"])
    found: dict[str, Any] = job["spec"]
    return found


def notes_of(*objects: dict[str, Any]) -> str:
    _, notes = convert(objects, CHOICES)
    return "\n".join([*notes.left_out, *notes.decisions])


def test_a_pytorchjob_becomes_a_job_of_as_many_pods() -> None:
    policy = {"ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 7200, "suspend": True, "backoffLimit": 3}
    job, notes = convert([pytorchjob(nprocPerNode="8", runPolicy=policy)], CHOICES)
    SCHEMA.validate(job)
    assert job["metadata"] == {
        "name": "llama", "namespace": "ml", "labels": {"kueue.x-k8s.io/queue-name": "team"}
    }  # fmt: skip
    spec = job["spec"]
    assert spec["accelerator"] == {"resource": "nvidia.com/gpu", "perNode": [8]}
    assert spec["nodes"] == {"min": 4, "max": 4, "podsPerNode": "Many"}
    assert spec["checkpoint"] == {"claimName": "checkpoints", "path": "llama", "format": "DeepSpeed"}
    assert spec["batch"] == {"globalSamples": 512, "microSamples": 1}
    assert (spec["suspend"], spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]) == (True, 60, 7200)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun", "/app/train.py"]
    assert container["resources"] == {"limits": {"memory": "400Gi"}}
    told = "\n".join(notes.left_out)
    for field in ("runPolicy.backoffLimit", "Worker.restartPolicy", "containers[0] --nnodes"):
        assert field in told
    assert any(text.startswith("spec.nodes: min is 4") for text in notes.decisions)


def test_an_elastic_pytorchjob_keeps_its_range() -> None:
    job = pytorchjob(elasticPolicy={"minReplicas": 1, "maxReplicas": 6, "rdzvBackend": "c10d", "maxRestarts": 10})
    del job["spec"]["pytorchReplicaSpecs"]["Master"]
    assert spec_of(job)["nodes"] == {"min": 1, "max": 6, "podsPerNode": "Many"}
    assert "spec.elasticPolicy.rdzvBackend" in notes_of(job)


def test_a_jobset_becomes_a_job_of_all_its_pods() -> None:
    spec = spec_of(jobset(2, 1, failurePolicy={"maxRestarts": 3}))
    assert spec["nodes"]["max"] == 6
    assert "spec.failurePolicy" in notes_of(jobset(1, failurePolicy={"maxRestarts": 3}))


def test_a_trainjob_is_read_with_its_runtime() -> None:
    trainer = {
        "numNodes": 3,
        "image": "registry.example.com/other:2",
        "command": ["torchrun", "/b.py"],
        "env": [{"name": "A", "value": "job"}],
        "resourcesPerNode": {"limits": {"amd.com/gpu": "4"}},
    }
    spec = spec_of(trainjob(**trainer), runtime())
    assert spec["accelerator"] == {"resource": "amd.com/gpu", "perNode": [4]}
    assert spec["nodes"]["max"] == 3
    (container,) = spec["template"]["spec"]["containers"]
    assert (container["image"], container["command"]) == ("registry.example.com/other:2", ["torchrun", "/b.py"])
    assert container["env"] == [{"name": "B", "value": "b"}, {"name": "A", "value": "job"}]
    assert spec_of(trainjob(), runtime())["nodes"]["max"] == 2


def namespaced(job: str, *runtimes: str) -> list[dict[str, Any]]:
    """Return a TrainJob in namespace `job`, and a TrainingRuntime of one name in each other namespace."""
    found = changed(changed(trainjob(), "metadata.namespace", job), "spec.runtimeRef.kind", "TrainingRuntime")
    of_namespace = changed(runtime(), "kind", "TrainingRuntime")
    return [found, *(changed(of_namespace, "metadata.namespace", name) for name in runtimes)]


def test_a_training_runtime_is_that_of_the_trainjobs_namespace() -> None:
    job, *runtimes = namespaced("research", "serving", "research")
    other = changed(runtimes[0], "spec.mlPolicy.numNodes", 7)
    assert spec_of(job, other, runtimes[1])["nodes"]["max"] == 2


def test_an_abbreviated_option_is_the_one_that_torchrun_takes_it_for() -> None:
    template = pod(command=["torchrun", "--nno", "4", "--standal", "--tee=3", "t.py", "--nno", "5"])
    (container,) = spec_of(pytorchjob(template))["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun", "--tee=3", "t.py", "--nno", "5"]


def test_policies_of_a_runtime_are_noted() -> None:
    found = changed(runtime(), "spec.template.spec.successPolicy", {"operator": "All"})
    assert "spec.template.spec.successPolicy: the job is Complete" in notes_of(trainjob(), found)


def test_what_only_the_controller_of_the_source_understands_is_noted() -> None:
    marks = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack", "team": "a"}
    job, notes = convert([changed(jobset(1), "metadata.annotations", marks)], CHOICES)
    assert job["metadata"]["annotations"] == {"team": "a"}
    assert any(text.startswith("metadata.annotations.alpha.jobset.sigs.k8s.io/exclusive") for text in notes.left_out)


@pytest.mark.parametrize(
    "path",
    ["metadata.ownerReferences", "metadata.finalizers", "spec.pytorchReplicaSpecs.Master.template.metadata.finalizers"],
)
def test_metadata_that_is_not_taken_over_is_noted(path: str) -> None:
    job = changed(pytorchjob(), path, ["x"])
    if "template" in path:
        job = changed(job, path.replace("Master", "Worker"), ["x"])
    assert f"{path}: " in notes_of(job)


def test_choices_win_over_what_was_found() -> None:
    choices = Choices(
        claim="other", path="a/b", checkpoint_format="DCP", global_samples=64, micro_samples=2, least_nodes=2
    )
    spec = spec_of(pytorchjob(), choices=choices)
    assert spec["checkpoint"] == {"claimName": "other", "path": "a/b", "format": "DCP"}
    assert (spec["batch"], spec["nodes"]["min"]) == ({"globalSamples": 64, "microSamples": 2}, 2)


def test_what_the_operator_sets_is_left_out_of_the_pods() -> None:
    variables = [{"name": name, "value": "1"} for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "PET_NNODES", "KEPT")]
    template = pod(env=variables)
    template["spec"] |= {"subdomain": "x", "restartPolicy": "OnFailure", "tolerations": [{"key": "a"}]}
    template["metadata"] = {"labels": {"team": "a"}, "creationTimestamp": "now"}
    found = spec_of(pytorchjob(template))["template"]
    assert found["spec"]["containers"][0]["env"] == [{"name": "KEPT", "value": "1"}]
    assert not {"subdomain", "restartPolicy"} & set(found["spec"])
    assert found["spec"]["tolerations"] == [{"key": "a"}]
    assert found["metadata"] == {"labels": {"team": "a"}}
    assert "env MASTER_ADDR" in notes_of(pytorchjob(template))


def test_the_container_that_trains_comes_first() -> None:
    template = pod()
    template["spec"]["containers"].insert(0, {"name": "logs", "image": "registry.example.com/logs"})
    names = [item["name"] for item in spec_of(pytorchjob(template))["template"]["spec"]["containers"]]
    assert names == ["pytorch", "logs"]


def test_a_field_that_nobody_knows_is_noted() -> None:
    assert "spec.color: the converter does not know it" in notes_of(pytorchjob(color="red"))


def test_other_objects_of_the_file_are_noted() -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    assert "Service (v1): it stays as it is" in notes_of(service, pytorchjob())


def test_a_command_that_starts_no_launcher_is_noted() -> None:
    assert "neither torchrun" in notes_of(pytorchjob(pod(command=["python", "train.py"])))
    assert "neither torchrun" not in notes_of(pytorchjob(pod(command=["bash", "-c", "torchrun train.py"])))


def changed(job: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Copy an object with one field set, or removed if the value is None."""
    result = copy.deepcopy(job)
    at = result
    *parents, name = path.split(".")
    for parent in parents:
        at = at[int(parent)] if isinstance(at, list) else at.setdefault(parent, {})
    if value is None:
        del at[name]
    else:
        at[name] = value
    return result


WORKER = "spec.pytorchReplicaSpecs.Worker"
JOB = "spec.replicatedJobs.0.template.spec"


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ([], "found nothing"),
        ([pytorchjob(), jobset(1)], "found PyTorchJob"),
        ([changed(pytorchjob(), "apiVersion", "kubeflow.org/v2")], "expected one of"),
        ([changed(pytorchjob(), "metadata.name", "Llama")], "rename it"),
        ([changed(pytorchjob(), "metadata.name", "a" * 41)], "at most 40"),
        ([changed(pytorchjob(), "metadata", {"generateName": "x-"})], "metadata.name is missing"),
        ([changed(pytorchjob(), "spec", [])], "spec is a list: expected a mapping"),
        ([changed(pytorchjob(), f"{WORKER}.replicas", "3")], "expected a whole number"),
        (
            [changed(pytorchjob(), f"{WORKER}.template.spec.containers.0.image", "x")],
            "differ at spec.containers.0.image",
        ),
        ([changed(pytorchjob(), "spec.pytorchReplicaSpecs", {})], "neither Master nor Worker"),
        (
            [changed(pytorchjob(), "spec.pytorchReplicaSpecs.Evaluator", {"replicas": 1})],
            "Evaluator cannot be converted",
        ),
        ([pytorchjob(elasticPolicy={"minReplicas": 1})], "remove Master"),
        ([pytorchjob(nprocPerNode="cpu")], "CPUs are not converted"),
        ([pytorchjob(nprocPerNode="4")], "starts 4 processes for 8 accelerators"),
        ([pytorchjob(pod(resources={"limits": {"cpu": 4}}))], "asks for no accelerators"),
        (
            [pytorchjob(pod(resources={"limits": {"nvidia.com/gpu": "0.5"}}))],
            "expected a whole number of nvidia.com/gpu",
        ),
        ([pytorchjob(pod(resources={"limits": {"a.com/gpu": 1, "b.com/gpu": 1}}))], "--accelerator"),
        ([pytorchjob(pod(volumeMounts=[]))], "--claim"),
        ([pytorchjob({"spec": {**pod()["spec"], "nodeName": "n1"}})], "nodeName cannot be converted"),
        ([pytorchjob({"spec": {**pod()["spec"], "hostNetwork": True}})], "ClusterFirstWithHostNet"),
        (
            [pytorchjob(pod(command=["bash", "-c", "torchrun --nproc_per_node=8 t.py"]))],
            "--nproc_per_node: remove these",
        ),
        ([pytorchjob(pod(command=["env", "A=1", "torchrun", "--nnodes", "4", "t.py"]))], "--nnodes: remove these"),
        ([pytorchjob(pod(command=["sh", "-c", "torchrun '--nnodes=4' t.py"]))], "--nnodes: remove these"),
        (
            [pytorchjob(pod(command=["sh", "-c", 'exec torchrun --tee 3 \\\n --nproc_per 8 t.py --node 3 "$@"']))],
            "with --nproc_per: remove these",
        ),
        ([pytorchjob(pod(command=["torchrun", "--nproc-per-node", "cpu", "t.py"]))], "CPUs are not converted"),
        ([pytorchjob(pod(command=["torchrun", "--new-option", "x", "t.py"]))], "--new-option is no option"),
        ([changed(jobset(2), f"{JOB}.completions", 5)], "parallelism is 2"),
        ([jobset()], "replicatedJobs is empty"),
        ([jobset(1, volumeClaimPolicies=[{"templates": []}])], "volumeClaimPolicies cannot be converted"),
        ([changed(jobset(1, 1), f"{JOB}.template.spec.containers.0.image", "x")], "differ at"),
        ([trainjob()], "with a second -f"),
        (
            [changed(trainjob(), "spec.initializer", {"model": {"storageUri": "hf://x"}}), runtime()],
            "initializer cannot be",
        ),
        ([changed(trainjob(), "spec.podTemplateOverrides", [{}]), runtime()], "podTemplateOverrides cannot be"),
        ([trainjob(), runtime(mpi={"numProcPerNode": 1})], "mpi cannot be converted"),
        ([trainjob(), runtime(), runtime()], "hold 2 times"),
        ([*namespaced("research", "serving")], "'torch-distributed' of namespace research, which is in no file"),
    ],
)
def test_what_cannot_be_converted_truly_is_refused(objects: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConvertError) as caught:
        convert(objects, CHOICES)
    assert message in str(caught.value)


def test_the_global_batch_must_be_said() -> None:
    with pytest.raises(ConvertError, match="--global-samples"):
        convert([pytorchjob()], Choices())


@pytest.mark.parametrize(
    ("command", "args", "left"),
    [
        (["torchrun", "--nnodes", "4", "--tee", "3", "a.py", "--nnodes", "7"], [], "torchrun --tee 3 a.py --nnodes 7"),
        (
            ["python3.11", "-m", "torch.distributed.run"],
            ["--standalone", "-m", "a"],
            "python3.11 -m torch.distributed.run -m a",
        ),
        (["/usr/bin/torchrun"], ["--rdzv_endpoint=$(X):1", "--node-rank", "$(R)", "a.py"], "/usr/bin/torchrun a.py"),
        (["python", "train.py", "--nnodes=2"], [], "python train.py --nnodes=2"),
        (
            ["python", "-m", "elastic_trainer.launch", "--preload", "torch", "--nproc", "8", "a.py"],
            [],
            "python -m elastic_trainer.launch --preload torch a.py",
        ),
        (
            ["python3", "-uB", "-X", "dev", "-m", "torch.distributed.run", "--nnodes=4", "a.py"],
            [],
            "python3 -uB -X dev -m torch.distributed.run a.py",
        ),
        (["python", "-u", "a.py", "-m", "torch.distributed.run", "x"], [], "python -u a.py -m torch.distributed.run x"),
        ([], ["a.py"], "a.py"),
    ],
)
def test_options_that_the_operator_sets_are_removed(command: list[str], args: list[str], left: str) -> None:
    found = remove_launch_options(command, args, "x")
    assert " ".join([*found.command, *found.args]) == left


ALIASES = "b0: &b0 [x]\n" + "".join(f"b{i}: &b{i} [{f'*b{i - 1}, ' * 9}]\n" for i in range(1, 9))
"""A small file whose aliases stand for 43 million values."""


MERGES = "b0: &b0 {k: 1}\n" + "".join(f"b{i}: &b{i} {{<<: [*b{i - 1}, *b{i - 1}]}}\n" for i in range(1, 18))
"""The same with merged mappings: each has twice the keys of the one before, until equal ones are dropped."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "cannot be read as YAML"),
        ("a: 1\na: 2", "the key a is there twice"),
        ("on: 1", "is no text"),
        ("- a", "holds a list"),
        ("!!python/name:os.system {}", "cannot be read as YAML"),
        ("a: !!binary aGk=", "holds a bytes"),
        ("[" * 100 + "]" * 100, "more than"),
        (ALIASES, "more than"),
        (MERGES, "more than"),
        ("x" * (1 << 20) + "x", "is larger than"),
        ("kind: List\nitems: 3", "no list of objects"),
    ],
)
def test_a_file_is_read_strictly_and_within_bounds(text: str, message: str) -> None:
    with pytest.raises(ConvertError) as caught:
        read_documents(text, "f.yaml")
    assert message in str(caught.value)


def test_lists_are_taken_apart_and_times_stay_text() -> None:
    text = "kind: List\nitems:\n- {kind: A, t: 2026-01-01}\n---\nkind: B\n---\n"
    assert read_documents(text, "f") == [{"kind": "A", "t": "2026-01-01"}, {"kind": "B"}]


def test_the_command_prints_yaml_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(pytorchjob(pod(command=["bash", "-c", "cd /app\ntorchrun t.py\n"]))))
    assert main(["convert", "-f", str(path), "--global-samples", "512"], {}) == Exit.OK
    out, err = capsys.readouterr()
    assert "- |\n" in out
    job = yaml.safe_load(out)
    assert job == convert(read_documents(path.read_text(), "x"), CHOICES)[0]
    assert {line.partition(":")[0] for line in err.splitlines()} == {"left out", "decide"}
    assert main(["convert", "-o", "json", "-f", str(path), "--global-samples", "512"], {}) == Exit.OK
    assert json.loads(capsys.readouterr().out) == job


NUMBERS_OF_KUBECTL = ["1e-4", "5E3", "+1e3", "0o17", "0X1F", "0B1", "y", "N"]
"""Texts that kubectl reads as numbers or booleans where they are not in quotes, and PyYAML does not."""


@pytest.mark.parametrize("form", ["text", "yaml"])
def test_texts_that_kubectl_would_read_as_numbers_are_in_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(pytorchjob(pod(command=["torchrun", "a.py", *NUMBERS_OF_KUBECTL]))))
    assert main(["convert", "-o", form, "-f", str(path), "--global-samples", "512"], {}) == Exit.OK
    out = capsys.readouterr().out
    assert [text for text in NUMBERS_OF_KUBECTL if f"- '{text}'\n" not in out] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0o644", 0o644), ("0644", 0o644), ("0", 0), ("-7", -7), ("1_000", 1000), ("0x1F", 31), ("0b11", 3)),
        *(("1.5", 1.5), ("-.5", -0.5), ("1.0e+3", 1000.0), ("true", True), ("null", None), ("ab", "ab")),
        *(("1:30", "1:30"), ("22:22", "22:22"), ("1:30:00", "1:30:00"), ("1:30.5", "1:30.5")),
        ("2026-11-27", "2026-11-27"),
    ],
)
def test_a_value_is_read_as_the_api_server_reads_it(text: str, value: object) -> None:
    assert read_documents(f"value: {text}", "f") == [{"value": value}]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "-f", str(tmp_path / "absent.yaml")], {}) == Exit.REFUSED
    assert "cannot be read: No such file" in capsys.readouterr().err
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(pytorchjob()))
    assert main(["convert", "-f", str(path)], {}) == Exit.REFUSED
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    with pytest.raises(SystemExit):
        main(["convert", "-f", str(path), "--global-samples", "0"], {})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


ODD = st.sampled_from(
    [None, 0, -1, 1.5, 10**30, True, "", "x", "8", "\x1b[1m", "a" * 300, [], [None], [1], {}, {"a": None}]
)
SOURCES = [
    [pytorchjob(nprocPerNode="8", runPolicy={"suspend": True})],
    [jobset(2, 1)],
    [trainjob(numNodes=2), runtime()],
]


@given(st.data())
@settings(max_examples=examples(300))
def test_whatever_a_field_holds_the_result_is_valid_or_the_source_is_refused(data: st.DataObject) -> None:
    objects = copy.deepcopy(data.draw(st.sampled_from(SOURCES)))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, key = data.draw(st.sampled_from([path for path in places(objects) if len(path) > 1]))
        at: Any = objects
        for parent in parents:
            at = at[parent]
        at[key] = copy.deepcopy(data.draw(ODD))
    try:
        job, _ = convert(objects, CHOICES)
    except ConvertError as error:
        assert str(error)
        return
    SCHEMA.validate(job)


def test_examples_in_docstrings_are_right() -> None:
    assert doctest.testmod(launcher).failed == 0
