"""Settings from the environment, and the errors for an environment that is invalid."""

from pathlib import Path

import pytest

from elastic_trainer.batch import BatchPlan
from elastic_trainer.errors import ConfigurationError
from elastic_trainer.settings import from_env
from reshard.topology import Topology


def test_an_empty_environment_is_one_process_in_attempt_1():
    found = from_env({})
    assert (found.topology, found.attempt, found.rank, found.resume) == (Topology(), 1, 0, None)


def test_without_a_topology_all_ranks_are_data_parallel():
    assert from_env({"WORLD_SIZE": "4", "RANK": "3"}).topology == Topology(dp=4)


def test_reads_what_the_operator_sets():
    found = from_env(
        {
            "ETJ_JOB": "gpt",
            "ETJ_NAMESPACE": "team",
            "ETJ_ATTEMPT": "7",
            "ETJ_TOPOLOGY": '{"tp":2,"pp":1,"dp":2,"ep":1,"cp":1,"zero":1}',
            "ETJ_GLOBAL_BATCH": "20",
            "ETJ_MICRO_BATCH": "2",
            "ETJ_CHECKPOINT_ROOT": "/checkpoint/gpt",
            "ETJ_CHECKPOINT_INTERVAL_SECONDS": "60",
            "ETJ_RESUME": "/checkpoint/gpt/a7/step-00000020",
            "ETJ_LEASE": "gpt-a7",
            "ETJ_HEARTBEAT_SECONDS": "5",
            "WORLD_SIZE": "4",
            "RANK": "2",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": "6443",
        }
    )
    assert found.topology == Topology(tp=2, dp=2)
    assert (found.job, found.namespace, found.attempt, found.lease) == ("gpt", "team", 7, "gpt-a7")
    assert (found.global_batch, found.micro_batch, found.heartbeat_seconds) == (20, 2, 5.0)
    assert found.resume == Path("/checkpoint/gpt/a7/step-00000020")
    assert found.checkpoint_interval_seconds == 60
    assert found.api_server == ("10.96.0.1", 6443)


def test_an_empty_resume_is_a_first_start():
    assert from_env({"ETJ_RESUME": ""}).resume is None


def test_all_problems_are_told_at_once_with_every_factor():
    with pytest.raises(ConfigurationError) as caught:
        from_env({"ETJ_TOPOLOGY": "tp=2,pp=3,dp=1", "WORLD_SIZE": "4", "ETJ_GLOBAL_BATCH": "many"})
    assert "ETJ_GLOBAL_BATCH='many'" in str(caught.value)
    assert "pp(3) * dp(1) * tp(2) = 6, but WORLD_SIZE is 4" in str(caught.value)


@pytest.mark.parametrize(("global_batch", "micro_batch", "dp", "steps"), [(20, 2, 1, 10), (20, 2, 2, 5), (12, 1, 3, 4)])
def test_accumulation_makes_up_for_replicas(global_batch, micro_batch, dp, steps):
    assert BatchPlan(global_batch=global_batch, micro_batch=micro_batch, dp=dp).accumulation_steps == steps


@pytest.mark.parametrize(("global_batch", "micro_batch", "dp"), [(20, 2, 3), (20, 3, 1), (0, 2, 1), (20, 0, 1)])
def test_a_batch_that_cannot_be_divided_is_refused(global_batch, micro_batch, dp):
    with pytest.raises(ConfigurationError, match=f"global batch {global_batch} .* micro batch {micro_batch} x {dp}"):
        BatchPlan(global_batch=global_batch, micro_batch=micro_batch, dp=dp)


def test_asynchronous_saves_are_off_and_stage_where_temporary_files_go():
    found = from_env({"ETJ_SCRATCH": "/memory"})
    assert (found.async_saves, found.staging, found.staging_bytes) == (False, Path("/memory"), 0)
    found = from_env({"ETJ_ASYNC_SAVES": "true", "ETJ_STAGING": "/disk", "ETJ_STAGING_BYTES": "5e9"})
    assert (found.async_saves, found.staging, found.staging_bytes) == (True, Path("/disk"), 5_000_000_000)
