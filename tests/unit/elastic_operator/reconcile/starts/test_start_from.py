"""A job that starts from a checkpoint of others (`spec.checkpoint.startFrom`): when it is used, what is passed on."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import SpecError, parse_spec, spec_hash
from elastic_operator.api.status import Phase, StartedFrom, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import start_uri
from elastic_operator.observed.observation import JobView, Observation, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.plugin.pages.job_source import JobSource
from elastic_operator.plugin.pages.wait_reason import explain_wait
from elastic_operator.reconcile.actions import Create, Decision
from elastic_operator.reconcile.decide import decide
from elastic_trainer.retention import find_commits
from reshard.cli.options import parse
from reshard.commits.commit import Commit, write_commit
from reshard.contract import ExitCode, ReshardReport
from reshard.topology import Topology
from tests.unit.elastic_operator.reconcile.test_decide_phases import JOB, NOW, SPEC, nodes, settled

START = {**SPEC["checkpoint"], "startFrom": "old/run"}
IDLE = Observation(nodes=nodes("n1", "n2", "n3"))
REPORT = ReshardReport(
    ok=True, exit_code=0, message="done", source="/checkpoint/old/run/global_step1000", step=1000, samples=20000,
    bytes_written=100, verified=True,
)  # fmt: skip


def look(status: Status, world: Observation = IDLE, *, now: float = NOW, request: str = "", **changes: Any) -> Decision:
    spec = parse_spec({**copy.deepcopy(SPEC), "checkpoint": START, **changes})
    return decide(dataclasses.replace(JOB, retry_request=request), spec, status, world, limits=Timeouts(), now=now)


def converted(report: ReshardReport | None, *, attempt: int = 1, phase: str = "", failed: bool = False) -> Observation:
    """The reshard Job has ended, well unless the report says otherwise; None: the report is lost."""
    failed = failed or (report is not None and report.exit_code != 0)
    job = JobView(
        name=f"gpt-a{attempt}-reshard", uid=f"r{attempt}", attempt=attempt, role="reshard", complete=not failed,
        failed=failed,
    )  # fmt: skip
    pod = PodView(
        name="x", uid="rp", attempt=attempt, role="reshard", phase=phase or ("Failed" if failed else "Succeeded"),
        termination_message=report.to_json() if report else "",
    )  # fmt: skip
    return dataclasses.replace(IDLE, jobs=(job,), pods=(pod,))


def refused(code: ExitCode) -> ReshardReport:
    return ReshardReport(ok=False, exit_code=int(code), message="/checkpoint/old/run: there is no such folder")


def arguments(decision: Decision) -> list[str]:
    (create,) = [action for action in decision.actions if isinstance(action, Create)]
    return list(create.manifest["spec"]["template"]["spec"]["containers"][0]["args"])


def test_the_first_attempt_waits_for_a_conversion_of_what_it_starts_from() -> None:
    decision = look(Status())
    status = decision.status
    assert (status.phase, status.reason, status.attempt) == (Phase.RESHARDING, "StartFrom", 1)
    words = arguments(decision)
    assert words[:5] == ["run", "/checkpoint/old/run", "/checkpoint/gpt/a1/step-start", "--to", "tp=2,pp=3,dp=1,zero=1"]
    assert {"--newest", "--format"} < set(words)
    assert "--require-commit" not in words
    assert "StartsFromNothing" not in [event.reason for event in decision.events]


def test_what_the_resharder_asks_for_is_passed_on_as_the_pods_see_it() -> None:
    options = {"patterns": "old/patterns.yaml", "names": "names.yaml", "like": "other/global_step1"}
    decision = look(Status(), checkpoint={**START, "startOptions": options})
    words = arguments(decision)
    given = {words[at]: words[at + 1] for at, word in enumerate(words) if word in ("--patterns", "--names", "--like")}
    assert given == {
        "--patterns": "/checkpoint/old/patterns.yaml",
        "--names": "/checkpoint/names.yaml",
        "--like": "/checkpoint/other/global_step1",
    }
    assert parse(words).names == given["--names"]  # the resharder understands them


def test_an_option_that_is_corrected_changes_what_an_attempt_is_made_from() -> None:
    plain = parse_spec({**copy.deepcopy(SPEC), "checkpoint": START})
    told = parse_spec({**copy.deepcopy(SPEC), "checkpoint": {**START, "startOptions": {"names": "names.yaml"}}})
    empty = parse_spec({**copy.deepcopy(SPEC), "checkpoint": {**START, "startOptions": {}}})
    assert spec_hash(plain) == spec_hash(empty) != spec_hash(told)


@pytest.mark.parametrize(
    ("checkpoint", "problem"),
    [
        ({**START, "startOptions": {"like": "../x"}}, r"startOptions\.like is '\.\./x': expected a place inside"),
        ({**START, "startOptions": {"names": "a b"}}, r"startOptions\.names is 'a b': expected letters"),
        (
            {"claimName": "c", "startOptions": {"names": "n"}},
            r"startOptions says how to read startFrom, which is empty",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(checkpoint: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=rf"spec\.checkpoint\.{problem}"):
        parse_spec({**copy.deepcopy(SPEC), "checkpoint": checkpoint})


def test_others_files_are_never_only_pointed_at() -> None:
    decision = look(Status(), reshard={"mode": "Virtual"})
    assert "--mode" not in arguments(decision)
    assert decision.status.reshard is not None
    assert "may remove it" in decision.status.reshard.mode_reason


def test_the_attempt_goes_on_from_the_step_that_the_resharder_reports() -> None:
    decision = look(look(Status()).status, converted(REPORT))
    status = decision.status
    assert [type(action).__name__ for action in decision.actions] == ["LaunchAttempt"]
    assert status.started_from == StartedFrom(source=REPORT.source, step=1000, samples=20000)
    assert read_status(to_wire(status)).status.started_from == status.started_from
    assert status.current is not None
    assert status.progress is not None
    assert (status.current.resume.step, status.progress.step, status.checkpoint.step) == (1000, 1000, 1000)
    assert status.checkpoint.uri == status.current.resume.uri == "/checkpoint/gpt/a1/step-start"
    resumed = find(status.conditions, Type.RESUMED)
    assert resumed is not None
    assert f"step 1000 of {REPORT.source} (spec.checkpoint.startFrom)" in resumed.message


def test_a_job_with_a_commit_of_its_own_does_not_look_at_it() -> None:
    status = dataclasses.replace(settled(), current=None)
    decision = look(status)
    assert decision.status.current is not None
    assert decision.status.current.resume.source == status.checkpoint.uri
    assert not decision.status.current.resume.external


def test_an_attempt_that_fails_before_its_first_commit_does_not_convert_again() -> None:
    launched = look(look(Status()).status, converted(REPORT)).status
    status = look(dataclasses.replace(launched, current=None)).status
    assert status.current is not None
    assert (status.attempt, status.current.resume.uri) == (2, "/checkpoint/gpt/a1/step-start")
    assert status.current.resume.ready


def test_it_is_converted_again_where_no_commit_is_left() -> None:
    status = settled()
    history = tuple(dataclasses.replace(item, invalid=True, writer="reshard") for item in status.checkpoint.history)
    status = dataclasses.replace(
        status,
        current=None,
        checkpoint=dataclasses.replace(status.checkpoint, history=history),
        started_from=StartedFrom(source=REPORT.source, step=10),
    )
    after = look(status).status
    assert after.current is not None
    assert after.current.resume.external
    assert after.current.resume.reason.startswith("all 2 known commits are invalid: /checkpoint/old/run")


@pytest.mark.parametrize("on_failure", ["RetainTopology", "Fail"])
@pytest.mark.parametrize("code", [ExitCode.SOURCE_INVALID, ExitCode.UNSUPPORTED, ExitCode.PLAN_INVALID, ExitCode.USAGE])
def test_what_cannot_be_started_from_fails_the_job_with_the_resharders_words(code: ExitCode, on_failure: str) -> None:
    reshard = {"onFailure": on_failure}
    status = look(look(Status(), reshard=reshard).status, converted(refused(code)), reshard=reshard).status
    assert (status.phase, status.reason, status.attempt) == (Phase.FAILED, "ReshardFailed", 1)
    failed = find(status.conditions, Type.RESHARD_FAILED)
    assert failed is not None
    assert failed.status == "True"
    for text in (status.message, failed.message):
        assert "/checkpoint/old/run: there is no such folder" in text
        assert "kubectl etj retry gpt" in text
    waiting = explain_wait(JobSource(name="gpt", namespace="demo", status=status, generation=1), NOW)
    assert (waiting.doing, waiting.advice) == (status.message, "")
    assert status.started_from is None


@pytest.mark.parametrize("code", [ExitCode.STORAGE_FULL, ExitCode.TARGET_FAILED, ExitCode.VERIFICATION_FAILED])
def test_what_may_pass_is_tried_again_until_the_limit(code: ExitCode) -> None:
    limited = {"backoffLimit": 1}
    first = look(look(Status(), reshard=limited).status, converted(refused(code)), reshard=limited)
    assert (first.status.phase, first.status.reason) == (Phase.RESHARDING, "ReshardRetry")
    again = converted(refused(code))
    again = dataclasses.replace(again, jobs=(dataclasses.replace(again.jobs[0], uid="second"),))
    assert look(first.status, again, now=NOW + 20, reshard=limited).status.phase == Phase.FAILED


def test_a_retry_by_hand_tries_again_under_the_next_number_and_from_the_corrected_folder() -> None:
    failed = look(look(Status()).status, converted(refused(ExitCode.SOURCE_INVALID))).status
    decision = look(failed, request="1", checkpoint={**START, "startFrom": "old/global_step1000"})
    assert (decision.status.phase, decision.status.attempt) == (Phase.RESHARDING, 2)
    assert arguments(decision)[1:3] == ["/checkpoint/old/global_step1000", "/checkpoint/gpt/a2/step-start"]


def test_a_correction_before_the_launch_plans_anew() -> None:
    decision = look(look(Status()).status, checkpoint={**START, "startFrom": "old/global_step1000"})
    assert decision.status.attempt == 2
    assert "SpecChanged" in [event.reason for event in decision.events]


@pytest.mark.parametrize(
    ("phase", "failures", "reason"),
    [
        pytest.param("Running", 0, "StartFrom", id="it-may-come"),
        pytest.param("Succeeded", 1, "ReshardRetry", id="lost"),
    ],
)
def test_without_a_report_the_step_is_not_known_and_the_job_is_made_again(
    phase: str, failures: int, reason: str
) -> None:
    status = look(look(Status()).status, converted(None, phase=phase)).status
    assert status.reshard is not None
    assert (status.phase, status.reason, status.reshard.failures) == (Phase.RESHARDING, reason, failures)


def test_steps_of_others_do_not_count_for_this_jobs_goodput() -> None:
    from elastic_operator.api.serialization import Time
    from elastic_operator.api.status import Recovery
    from elastic_operator.reconcile.progress import update_goodput

    launched = look(look(Status()).status, converted(REPORT)).status
    assert launched.progress is not None
    loss = Recovery(
        cause="PodFailed", detect_time=Time(NOW), signal_time=Time(NOW), stop_time=Time(NOW), plan_time=Time(NOW),
        launch_time=Time(NOW), schedule_time=Time(NOW), first_step_time=Time(NOW), lost_steps=10,
    )  # fmt: skip
    status = dataclasses.replace(
        launched,
        first_step_time=Time(NOW - 100),
        recoveries=(loss,),
        progress=dataclasses.replace(launched.progress, step=1010),
    )
    assert update_goodput(status, NOW).goodput["lostSeconds"] == pytest.approx(50)


def test_jobs_without_it_keep_their_hash_across_an_upgrade_of_the_operator() -> None:
    without = parse_spec(copy.deepcopy(SPEC))
    assert spec_hash(without) == spec_hash(
        parse_spec({**copy.deepcopy(SPEC), "checkpoint": {**START, "startFrom": ""}})
    )
    assert spec_hash(without) != spec_hash(parse_spec({**copy.deepcopy(SPEC), "checkpoint": START}))


def test_the_trainer_prunes_the_copy_like_any_other_commit(tmp_path: Path) -> None:
    folder = Path(start_uri(str(tmp_path), 1))
    folder.mkdir(parents=True)
    topology = Topology(dp=2)
    commit = Commit(
        format="deepspeed", step=1000, samples=20000, topology=topology, attempt=1, writer="reshard", files=[]
    )
    write_commit(folder, commit)
    assert find_commits(tmp_path) == [(1, 1000, folder)]


@pytest.mark.parametrize(
    ("path", "start", "problem"),
    [
        ("gpt", "/checkpoint/old", "relative"),
        ("gpt", "old/../../x", "relative"),
        ("gpt", "$(HOME)", "letters"),
        ("gpt", "gpt", "own attempts"),
        ("gpt", "gpt/a3/step-00000005", "own attempts"),
        ("", "a3/step-00000005", "own attempts"),
        ("gpt", "gpt/before/global_step5", None),
        ("gpt", "gpt/a3x", None),
        ("gpt", "gpt2/a3/step-00000005", None),
        ("gpt", "a3/step-00000005", None),
        ("", "global_step5", None),
    ],
)
def test_where_it_may_lie(path: str, start: str, problem: str | None) -> None:
    value = {**copy.deepcopy(SPEC), "checkpoint": {"claimName": "ckpt", "path": path, "startFrom": start}}
    if problem is None:
        assert parse_spec(value).checkpoint.start_from == start
        return
    with pytest.raises(SpecError, match=rf"spec\.checkpoint\.startFrom .*{problem}"):
        parse_spec(value)
