"""The checkpoint volume of a played cluster: a real folder, with the claims of the real trainer and resharder.

A commit is a folder with a COMMIT.json, which says only what is needed here. Everything that is published or removed is
checked: no attempt publishes after a later one has, and no commit disappears that its own job has not released.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from elastic_operator.manifests.attempt import CHECKPOINT_MOUNT
from elastic_trainer.publisher import MARKED, commit_name
from reshard.commits.root_owner import claim_root, read_owner
from reshard.contract import COMMIT_FILE, CommitRef, Env, LeaseKey, TakeOver

_ATTEMPT = re.compile(r"a[0-9]+/")


@dataclasses.dataclass(frozen=True, slots=True)
class PlayedCommit:
    """A commit.

    Attributes:
        uri: its folder, as pods see it.
        uid: UID of the job that wrote it.
    """

    uri: str
    step: int
    topology: Mapping[str, int]
    uid: str

    def notes(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return what rank 0 says about it on the Lease of its attempt."""
        attempt, samples = int(env[Env.ATTEMPT]), 20 * self.step
        ref = CommitRef(uri=self.uri, step=self.step, samples=samples, attempt=attempt, topology=self.topology)
        return {LeaseKey.STEP: str(self.step), LeaseKey.COMMIT: ref.to_json()}


def root_of(env: Mapping[str, str]) -> str:
    """Return the checkpoint root of a pod, from its environment variables."""
    return env[Env.CHECKPOINT_ROOT]


class PlayedVolume:
    """A volume.

    Args:
        problems: what must hold and did not is added here.
    """

    def __init__(self, problems: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="played-volume-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._problems = problems
        self._published: dict[str, PlayedCommit] = {}
        self._publishers: list[tuple[str, int]] = []
        self._choices: dict[str, PlayedCommit | None] = {}

    def owner(self, root: str) -> str:
        """Return the UID of the job that owns a root, empty for none."""
        owner = read_owner(self._path(root))
        return owner.uid if owner is not None else ""

    def commits(self, root: str) -> list[PlayedCommit]:
        """Return the commits below a root, oldest step first."""
        uris = [
            f"{root}/{path.parent.parent.name}/{path.parent.name}"
            for path in self._path(root).glob(f"a*/step-*/{COMMIT_FILE}")
        ]
        found = [commit for uri in uris if (commit := self.find(uri)) is not None]
        return sorted(found, key=lambda commit: (commit.step, commit.uri))

    def find(self, uri: str) -> PlayedCommit | None:
        """Return the commit in a folder, None if there is none."""
        try:
            content = json.loads((self._path(uri) / COMMIT_FILE).read_text())
        except FileNotFoundError:
            return None
        return PlayedCommit(uri, content["step"], content["topology"], content["uid"])

    def prepare(self, env: Mapping[str, str], step: int) -> PlayedCommit:
        """Check the claim of a training as `elastic_trainer` does, and return the commit that it may publish.

        Raises:
            NotOwnerError: the root belongs to another job.
        """
        root, resume = root_of(env), env[Env.RESUME]
        owner = self._claim(env, resumes=bool(resume) and Path(resume).is_relative_to(root))
        number = 1 + (MARKED if owner else 0)
        folder = f"{root}/a{env[Env.ATTEMPT]}"
        while self.find(uri := f"{folder}/{commit_name(step, number, env[Env.JOB_UID])}") is not None:
            number += 1
        return PlayedCommit(uri, step, json.loads(env[Env.TOPOLOGY]), env[Env.JOB_UID])

    def publish(self, commit: PlayedCommit, attempt: int) -> None:
        """Publish a commit of an attempt whose Lease has answered."""
        publisher = (commit.uid, attempt)
        if publisher in self._publishers[:-1]:
            self._problems.append(f"{commit.uri} was published after attempt {self._publishers[-1]} had published")
        if publisher not in self._publishers:
            self._publishers.append(publisher)
        if (owner := self.owner(commit.uri.rsplit("/", 2)[0])) != commit.uid:
            self._problems.append(f"{commit.uri} was published by job {commit.uid}, but the owner is {owner}")
        self._write(commit)

    def convert(
        self, env: Mapping[str, str], source: str, target: str, topology: Mapping[str, int], *, any_commit: bool
    ) -> PlayedCommit | None:
        """Convert a commit as `reshard run` does; return the source, or None if a root to take over holds no commit.

        Args:
            env: environment variables of the pod.
            source: the commit, or with `any_commit` a root whose newest commit is converted.
            target: folder of the result.
            topology: topology of the result.
            any_commit: the source may be a root.

        Raises:
            NotOwnerError: the root of the target belongs to another job.
            FileNotFoundError: there is no commit in the source.
        """
        root = root_of(env)
        if source == root and env[Env.TAKE_OVER] == TakeOver.RESUME:
            commit = self._take_over(env)
            if commit is not None:
                self._write(PlayedCommit(target, commit.step, {**_ONES, **topology}, env[Env.JOB_UID]))
            return commit
        self._claim(env, resumes=source.startswith(f"{root}/") and _ATTEMPT.match(source[len(root) + 1 :]) is not None)
        commit = self.find(source)
        if commit is None and any_commit:
            commit = next(reversed(self.commits(source)), None)
        if commit is None and not any_commit:
            self._problems.append(f"{target} is converted from {source}, which is no commit")
        if commit is None:
            raise FileNotFoundError(f"{source}: there is no commit")
        self._write(PlayedCommit(target, commit.step, {**_ONES, **topology}, env[Env.JOB_UID]))
        return commit

    def remove(self, env: Mapping[str, str], name: str) -> None:
        """Remove a commit that the operator has released to a training."""
        uri = f"{root_of(env)}/{name}"
        commit = self.find(uri)
        if commit is None:
            return
        if commit.uid != env[Env.JOB_UID]:
            self._problems.append(f"job {env[Env.JOB_UID]} was told to remove {uri} of job {commit.uid}")
        shutil.rmtree(self._path(uri))
        self._published.pop(uri, None)

    def missing(self) -> list[str]:
        """Return the commits that disappeared, although their job had not released them."""
        return [uri for uri, commit in self._published.items() if self.find(uri) != commit]

    def _take_over(self, env: Mapping[str, str]) -> PlayedCommit | None:
        """Take a root over as `reshard` does; return the newest commit of its former owner, chosen once."""
        root, uid = root_of(env), env[Env.JOB_UID]
        job = f"{env[Env.NAMESPACE]}/{env[Env.JOB]}"
        owner = claim_root(self._path(root), uid=uid, job=job, take_over=True)
        if uid not in self._choices:
            commits = self.commits(root)
            former = reversed(owner.previous if owner else ())
            writer = next((name for name in former if name in {commit.uid for commit in commits}), None)
            mine = [commit for commit in commits if writer in (None, commit.uid)]
            self._choices[uid] = mine[-1] if mine else None
        return self._choices[uid]

    def _claim(self, env: Mapping[str, str], *, resumes: bool) -> bool:
        """Claim the root; return whether it had another owner before."""
        owner = claim_root(
            self._path(root_of(env)),
            uid=env[Env.JOB_UID],
            job=f"{env[Env.NAMESPACE]}/{env[Env.JOB]}",
            take_over=env[Env.TAKE_OVER] == TakeOver.BEGIN,
            resumes=resumes,
        )
        return owner is not None and bool(owner.previous)

    def _write(self, commit: PlayedCommit) -> None:
        folder = self._path(commit.uri)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": commit.step, "topology": dict(commit.topology), "uid": commit.uid}
        (folder / COMMIT_FILE).write_text(json.dumps(content))
        self._published[commit.uri] = commit

    def _path(self, uri: str) -> Path:
        return self.folder / Path(uri).relative_to(CHECKPOINT_MOUNT)


_ONES = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "cp": 1, "zero": 1}
