"""Workflows of GitHub: pinned actions, least permissions, no text of others in a script, and targets that exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.pages import ROOT

WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github/workflows").glob("*"))}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
KEYS = {"name", "on", "permissions", "concurrency", "jobs"}
JOB_KEYS = {"needs", "if", "strategy", "runs-on", "timeout-minutes", "permissions", "env", "steps"}
STEP_KEYS = {"name", "id", "uses", "with", "env", "run"}
PERMISSIONS = {
    ("ci.yml", "test"): {"contents": "read"},
    ("ci.yml", "cluster"): {"contents": "read"},
    ("ci.yml", "all"): {"contents": "read"},
    ("release.yml", "build"): {"contents": "read"},
    ("release.yml", "publish"): {
        "contents": "write", "packages": "write", "id-token": "write", "attestations": "write",
    },
}  # fmt: skip


class StrictLoader(yaml.SafeLoader):
    """Refuses keys that stand twice, and reads `on` as a text, as GitHub does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"{node.start_mark}: a key stands twice"
        return super().construct_mapping(node, deep=deep)


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag != "tag:yaml.org,2002:bool" or first not in "oOyYnN"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@functools.cache
def load(name: str) -> dict[str, Any]:
    found = yaml.load(WORKFLOWS[name], Loader=StrictLoader)  # a safe loader
    assert isinstance(found, dict)
    return found


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in WORKFLOWS:
        for job, content in load(name)["jobs"].items():
            yield name, job, content


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_the_known_keys_and_no_right_outside_of_jobs(name: str) -> None:
    workflow = load(name)
    assert set(workflow) == KEYS
    assert workflow["permissions"] == {}
    assert "pull_request_target" not in workflow["on"]
    for job in workflow["jobs"].values():
        assert set(job) <= JOB_KEYS
        assert {"runs-on", "timeout-minutes", "permissions", "steps"} <= set(job)
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert set(step) <= STEP_KEYS
            assert ("uses" in step) != ("run" in step)


def test_each_job_has_the_rights_that_it_needs_and_no_more() -> None:
    assert {(name, job): content["permissions"] for name, job, content in jobs()} == PERMISSIONS


def test_what_builds_can_write_nothing_and_what_writes_builds_nothing() -> None:
    for _, job, content in jobs():
        scripts = " ".join(step.get("run", "") for step in content["steps"])
        is_writer = "write" in content["permissions"].values()
        assert not (is_writer and re.search(r"make (.*\s)?(setup|release|images|test\S*)\b", scripts)), job


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_to_a_commit_with_its_version(name: str) -> None:
    lines = [line for line in WORKFLOWS[name].splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(r"\s+(- )?uses: (actions|docker)/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_a_checkout_keeps_no_credentials() -> None:
    found = [step for _, _, job in jobs() for step in job["steps"] if "actions/checkout@" in step.get("uses", "")]
    assert found
    assert all(step["with"] == {"persist-credentials": False} for step in found)


def test_no_expression_stands_in_a_script_but_the_matrix() -> None:
    for name, job, content in jobs():
        for step in content["steps"]:
            assert set(re.findall(r"\$\{\{(.*?)\}\}", step.get("run", ""))) <= {" matrix.target "}, (name, job)


def test_every_target_of_make_exists() -> None:
    named = set()
    for _, _, content in jobs():
        named |= set(content.get("strategy", {}).get("matrix", {}).get("target", ()))
        for step in content["steps"]:
            for arguments in re.findall(r"\bmake ([^\n|>]*)", step.get("run", "")):
                words = [word for word in arguments.split() if not re.match(r"-|\w+=|\$|matrix|\}\}", word)]
                named |= set(words)
    assert {"lint", "test-fast", "test-engine", "docs", "setup", "release", "publish", "notes", "check-tag"} <= named
    assert named <= TARGETS


def test_outputs_that_a_step_reads_are_written_by_what_the_other_runs() -> None:
    text = WORKFLOWS["release.yml"]
    read = set(re.findall(r"steps\.push\.outputs\.(\w+)", text))
    written = (ROOT / "release/publish.sh").read_text(encoding="utf-8")
    assert read == {"operator", "reshard", "chart"}
    assert 'echo "chart=$digest" >> "$DIGESTS"' in written
    assert "for name in operator reshard; do" in written and 'echo "$name=$digest" >> "$DIGESTS"' in written
    assert 'DIGESTS="$GITHUB_OUTPUT"' in text
