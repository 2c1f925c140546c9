"""The whole system as a value: the resource, the API server, the nodes, the operator, the attempts and the volume.

Each transition is something that nothing can interrupt: a decision with the write of the status, an action, one access
of a trainer. Decisions are the real `decide`, actions the real `ClusterWriter`, trainers the real `Session`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from elastic_operator.api.claim_path import BEGINNING, Start
from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import Spec, parse_spec
from elastic_operator.api.status import Current, Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.manifests.attempt import JobRef, training_job
from elastic_operator.observed import commit_history
from elastic_operator.observed.observation import RESHARD, WORKER
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Action
from elastic_operator.reconcile.decide import UNSETTLED, decide
from elastic_operator.reconcile.failures.refused_commits import ASKING
from reshard.commits import commit as commit_file
from reshard.commits import root_owner, takeover
from reshard.contract import COMMIT_FILE, OWNER_FILE, Env, ExitCode, ReshardReport, TakeOver
from reshard.errors import NotOwnerError
from reshard.topology import Topology
from tests.property.protocol.api_server import GPU, NOW, ApiServer, Job, Objects, Pod
from tests.property.protocol.search import Step
from tests.property.protocol.storage import CheckpointRoot
from tests.property.protocol.trainer import FORMER, Lease, Process, Trainers

UID = "0b6c1f0e-1111-4222-8333-444455556666"
FORMER_UID, RIVAL_UID = "f0f0f0f0-1111", "c0c0c0c0-1111"
MARK = f"-{UID[:8]}"
"""End of the names of commits of a job that has taken the root over."""
CLAIM, PATH = "ckpt", "gpt"


class State(NamedTuple):
    """A state of the system.

    Attributes:
        status: number of the stored status.
        objects: number of the objects on the API server.
        processes: number of the processes of all attempts.
        storage: number of the content of the checkpoint root.
        work: number of the actions that the operator still has to do in this pass; 0 for none.
        lost: nodes that do not report.
        cut: attempts that cannot reach the API server.
        faults: number of faults that may still happen.
        reader: commit from which another job is about to start; empty for none.
        drain: value of the user's drain request.
        word: value of `spec.checkpoint.resumeFrom`.
    """

    status: int = 0
    objects: int = 0
    processes: int = 0
    storage: int = 0
    work: int = 0
    lost: frozenset[str] = frozenset()
    cut: frozenset[int] = frozenset()
    faults: int = 0
    reader: str = ""
    drain: str = ""
    word: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """Bounds of a search.

    Attributes:
        gpus: accelerators of each node; with different ones the next attempt needs a conversion.
        faults: number of faults that may happen.
        kinds: faults that may happen: `die`, `lose`, `cut`, `suspect`, `lost-answer`, `blind`, `reader`, `drain`,
            `power`, `refuse`, `reject`; with `return`, lost nodes come back; `rival`: a third job takes the root over.
        num_saves: saves of each attempt.
        takes_over: the root belongs to a job that has a commit there and still runs; this job has takeOver: Resume.
    """

    gpus: dict[str, int]
    faults: int
    kinds: frozenset[str]
    num_saves: int = 2
    takes_over: bool = False


class Table:
    """Numbers for values that take long to compare. `values[0]` is the first value."""

    def __init__(self, first: Any) -> None:
        self.values = [first]
        self._numbers = {first: 0}

    def number(self, value: Any) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class System:
    """All transitions of the system."""

    def __init__(self, root: CheckpointRoot, scenario: Scenario) -> None:
        self.scenario = scenario
        self.root = root
        self.trainers = Trainers(root, scenario.num_saves, has_rivals=scenario.takes_over)
        self._job = JobRef(name="gpt", namespace="ns", uid=UID, generation=1)
        self.server = ApiServer(self._job, scenario.gpus)
        self._statuses: list[Status] = []
        self._status_numbers: dict[str, int] = {}
        self._status_number(Status())
        self._objects = Table(Objects())
        self._processes = Table(())
        self._works = Table(())
        self._actions: list[Action] = []
        self._action_numbers: dict[str, int] = {}
        self._cache: dict[Any, Any] = {}

    @property
    def start(self) -> State:
        first = State(faults=self.scenario.faults)
        return self._add_former(first) if self.scenario.takes_over else first

    def _add_former(self, state: State) -> State:
        """Let a former owner make one commit; it goes on from there, and its Lease answers."""
        job = dataclasses.replace(self._job, uid=FORMER_UID)
        current = Current(topology=Topology(), num_nodes=1, gpus_per_node=1)
        container = training_job(job, self._spec(""), 1, current, 5.0)["spec"]["template"]["spec"]["containers"][0]
        environment = {item["name"]: item.get("value", "") for item in container["env"]}
        environment[Env.TAKE_OVER] = TakeOver.NEVER.value
        process = Process(FORMER, self.trainers.add_environment(environment))
        storage, lease = state.storage, Lease(())
        for call in ("start", "restore", "save"):
            is_over = False
            while not is_over:
                outcome = self.trainers.advance(process, call, storage, lease)
                process, storage, lease = outcome.process, outcome.storage, Lease(outcome.annotations)
                is_over = not process.call
        assert len(self.root.commits(storage)) == 1
        objects = Objects(leases=((FORMER, lease.annotations or ()),), rights=(FORMER,))
        after = self._with_objects(state, objects)._replace(storage=storage)
        return after._replace(processes=self._processes.number((process,)))

    def status(self, state: State) -> Status:
        """Return the stored status as the operator reads it."""
        return self._statuses[state.status]

    def objects(self, state: State) -> Objects:
        found: Objects = self._objects.values[state.objects]
        return found

    def processes(self, state: State) -> tuple[Process, ...]:
        found: tuple[Process, ...] = self._processes.values[state.processes]
        return found

    def successors(self, state: Any) -> Iterator[Step]:
        """Return the transitions from a state.

        Where a process is about to do something that nobody can notice or influence, that is the only transition:
        whatever else happens may as well happen after it.
        """
        for process in self.processes(state):
            if process.call and self._is_unnoticed(state, process):
                yield from self._train(state, process)
                return
        yield from self._operate(state)
        yield from self._run_jobs(state)
        for process in self.processes(state):
            if process.exit_code is None:
                yield from self._train(state, process)
        yield from self._recover(state)
        if state.faults:
            yield from self._fail(state)

    # -- the operator ---------------------------------------------------------------------------------------------

    def _operate(self, state: State) -> Iterator[Step]:
        if not state.work:
            yield from self._look(state)
            return
        work: tuple[int, ...] = self._works.values[state.work]
        rest = self._works.number(work[1:])
        yield Step("the operator dies in the middle of its pass", state._replace(work=0), is_fault=True)
        action = self._actions[work[0]]
        results, is_whole = self._act(state.objects, work[0])
        name = describe_action(action)
        for between in results[:-1]:
            after = state._replace(objects=between, work=0)
            yield Step(f"the operator dies in the middle of: {name}", after, is_fault=True)
        last = results[-1] if results else state.objects
        yield Step(f"the operator: {name}", state._replace(objects=last, work=rest if is_whole else 0))

    def _look(self, state: State) -> Iterator[Step]:
        quiet = {process.attempt for process in self.processes(state)}
        silent = frozenset(quiet & state.cut)
        yield from self._decide(state, frozenset(), "the operator looks and decides", cost=0)
        for attempt in sorted(quiet & {self.status(state).attempt}):
            cost = 0 if attempt in silent else 1
            if cost <= state.faults and ("suspect" in self.scenario.kinds or not cost):
                name = f"the operator finds attempt {attempt} silent for too long, and decides"
                yield from self._decide(state, frozenset({attempt}), name, cost=cost)

    # Nobody but the operator reads the status, so its write commutes with everything that happens between the look and
    # the write: the two are one transition. A write that fails equals a pass that did not take place.
    def _decide(self, state: State, stale: frozenset[int], name: str, *, cost: int) -> Iterator[Step]:
        key = ("decide", state.status, state.objects, state.lost, state.reader, state.drain, state.word, stale)
        if key not in self._cache:
            self._cache[key] = self._decision(state, stale)
        status, actions = self._cache[key]
        if status == state.status and not actions:
            return
        after = state._replace(status=status, work=self._works.number(actions), faults=state.faults - cost)
        yield Step(name, after, is_fault=bool(cost))

    def _decision(self, state: State, stale: frozenset[int]) -> tuple[int, tuple[int, ...]]:
        status = self.status(state)
        reader = Start(job="reader", claim=CLAIM, folder=PATH, reads_after=0.0)
        starts = frozenset({reader}) if state.reader else frozenset()
        world = self.server.observe(self.objects(state), state.lost, known=status.job_uids, stale=stale, starts=starts)
        job = dataclasses.replace(self._job, drain_request=state.drain)
        decision = decide(job, self._spec(state.word), status, world, limits=Timeouts(), now=NOW)
        assert not [event for event in decision.events if event.reason == UNSETTLED]
        return self._status_number(decision.status), tuple(map(self._action_number, decision.actions))

    def _spec(self, word: str) -> Spec:
        if ("spec", word) not in self._cache:
            value = make_spec(str(self.root.folder.parent), self.scenario)
            value["checkpoint"]["resumeFrom"] = word
            self._cache["spec", word] = parse_spec(value)
        spec: Spec = self._cache["spec", word]
        return spec

    def _status_number(self, status: Status) -> int:
        bare = leave_out_what_is_for_people(status)
        number = self._status_numbers.setdefault(repr(bare), len(self._statuses))
        if number == len(self._statuses):
            self._statuses.append(read_status(json.loads(json.dumps(to_wire(bare)))).status)
        return number

    def _action_number(self, action: Action) -> int:
        number = self._action_numbers.setdefault(repr(action), len(self._actions))
        if number == len(self._actions):
            self._actions.append(action)
        return number

    def _act(self, objects: int, action: int) -> tuple[list[int], bool]:
        key = ("act", objects, action)
        if key not in self._cache:
            results, is_whole = self.server.act(self._objects.values[objects], self._actions[action])
            self._cache[key] = [self._objects.number(item) for item in results], is_whole
        found: tuple[list[int], bool] = self._cache[key]
        return found

    # -- Kubernetes -----------------------------------------------------------------------------------------------

    def _run_jobs(self, state: State) -> Iterator[Step]:
        objects, processes = self.objects(state), self.processes(state)
        started = {process.attempt for process in processes}
        for job in objects.jobs:
            if job.role == WORKER and job.attempt not in started:
                yield from self._start_pod(state, job)
            pod = objects.pod(job.attempt)
            if job.role == WORKER and pod is not None and pod.phase == "Failed" and not job.is_failed:
                jobs = tuple(job._replace(is_failed=True) if item == job else item for item in objects.jobs)
                after = self._with_objects(state, objects._replace(jobs=jobs))
                yield Step(f"the Job controller marks the Job of attempt {job.attempt} as failed", after)
            if job.role == RESHARD and not (job.is_complete or job.is_failed):
                yield self._take_over(state, job) or self._convert(state, job)
                if "refuse" in self.scenario.kinds and state.faults:
                    yield self._refuse_conversion(state, job, ExitCode.UNSUPPORTED, "finds that it cannot convert")
                if "reject" in self.scenario.kinds and state.faults:
                    yield self._refuse_conversion(state, job, ExitCode.SOURCE_INVALID, "calls the commit damaged")
        for pod in objects.pods:
            if pod.is_deleted and pod.node not in state.lost:
                after = self._with_objects(state, objects.with_pod(pod.attempt, pod.role, None))
                after = self._with_process(after, pod.attempt, exit_code=137) if pod.role == WORKER else after
                yield Step(f"the kubelet stops the deleted pod of attempt {pod.attempt}", after)

    def _start_pod(self, state: State, job: Job) -> Iterator[Step]:
        objects = self.objects(state)
        container = self.server.container(job)
        environment = {item["name"]: item.get("value", "") for item in container["env"]}
        wanted = int(container["resources"]["limits"][GPU])
        used = {pod.node for pod in objects.pods if pod.phase == "Running" and pod.role == WORKER}
        free = [
            name for name, count in self.scenario.gpus.items() if name not in {*used, *state.lost} and count >= wanted
        ]
        if free:
            process = Process(job.attempt, self.trainers.add_environment(environment))
            processes = tuple(sorted([*self.processes(state), process]))
            after = self._with_objects(state, objects.with_pod(job.attempt, WORKER, Pod(job.attempt, WORKER, free[0])))
            yield Step(
                f"the pod of attempt {job.attempt} starts on {free[0]}",
                after._replace(processes=self._processes.number(processes)),
            )

    def _take_over(self, state: State, job: Job) -> Step | None:
        """Let a reshard pod claim the root, then choose, as `reshard` does; None if it has nothing to do before."""
        if self.server.container(job)["args"][1] != str(self.root.folder):
            return None
        owner, choice = (self.root.document(state.storage, name) for name in (OWNER_FILE, f"TAKEOVER-{UID}.json"))
        if owner.get("uid") == UID and choice:
            return None
        who = f"the reshard pod of attempt {job.attempt}"
        self.root.mount(state.storage)
        try:
            if owner.get("uid") == UID:
                takeover.take_root_over(self.root.folder, uid=UID, job="ns/gpt")
                return Step(f"{who} chooses the commit to go on from", state._replace(storage=self.root.read()))
            root_owner.claim_root(self.root.folder, uid=UID, job="ns/gpt", take_over=True)
            return Step(f"{who} claims the root", state._replace(storage=self.root.read()))
        except NotOwnerError as error:
            report = ReshardReport(ok=False, exit_code=ExitCode.NOT_OWNER, message=str(error))
            return Step(f"{who} finds another owner", self._end_conversion(state, job, report))

    def _convert(self, state: State, job: Job) -> Step:
        """Convert a commit, as a reshard pod does."""
        container = self.server.container(job)
        _, source, target, *_ = container["args"]
        if source == str(self.root.folder):
            source = f"{source}/{self.root.document(state.storage, f'TAKEOVER-{UID}.json')['commit']}"
        topology = Topology.parse(container["args"][container["args"].index("--to") + 1])
        key = ("convert", state.storage, source, target)
        if key not in self._cache:
            self._cache[key] = self._write_conversion(state.storage, source, target, topology)
        report = ReshardReport(
            ok=True,
            exit_code=ExitCode.OK,
            message="done",
            source=source,
            target=target,
            step=self.root.step(state.storage, source),
            verified=True,
        )
        after = self._end_conversion(state, job, report)._replace(storage=self._cache[key])
        return Step(f"the reshard pod of attempt {job.attempt} converts", after)

    def _refuse_conversion(self, state: State, job: Job, code: ExitCode, how: str) -> Step:
        report = ReshardReport(ok=False, exit_code=code, message="not supported")
        after = self._end_conversion(state, job, report)._replace(faults=state.faults - 1)
        return Step(f"the reshard pod of attempt {job.attempt} {how}", after, is_fault=True)

    def _end_conversion(self, state: State, job: Job, report: ReshardReport) -> State:
        objects = self.objects(state)
        ended = job._replace(is_complete=report.ok, is_failed=not report.ok)
        jobs = tuple(ended if item == job else item for item in objects.jobs)
        node = next(iter(self.scenario.gpus))
        phase = "Succeeded" if report.ok else "Failed"
        pod = Pod(job.attempt, RESHARD, node, phase, False, report.exit_code, report.to_json())
        return self._with_objects(state, objects._replace(jobs=jobs).with_pod(job.attempt, RESHARD, pod))

    def _write_conversion(self, storage: int, source: str, target: str, topology: Topology) -> int:
        self.root.mount(storage)
        folder = self.root.folder.__class__(target)
        old = commit_file.read_commit(source)
        if (folder / COMMIT_FILE).exists():
            return storage
        folder.mkdir(parents=True)
        commit = dataclasses.replace(
            old,
            topology=topology,
            attempt=int(folder.parent.name[1:]),
            writer="reshard",
            source=source,
            files=[],
            owner=UID,
        )
        commit_file.write_commit(folder, commit)
        return self.root.read()

    def _is_unnoticed(self, state: State, process: Process) -> bool:
        """Return whether the next access of a process has the same result at any time, and changes nothing for others.

        A refused Lease is refused for ever, and the marker of a newer attempt stays.
        """
        if process.attempt in state.cut or self.objects(state).lease(process.attempt) is not None:
            return False
        outcome = self.trainers.advance(process, process.call, state.storage, Lease(None))
        if outcome.access == "looks for newer attempts":
            return self.root.has_newer_marker(state.storage, process.attempt)
        return outcome.access == "renews its Lease and reports"

    # -- the attempts ---------------------------------------------------------------------------------------------

    def _train(self, state: State, process: Process) -> Iterator[Step]:
        kinds, faults = self.scenario.kinds, state.faults
        lease = Lease(self.objects(state).lease(process.attempt), is_cut=process.attempt in state.cut)
        for call in self.trainers.calls(process):
            outcome = self.trainers.advance(process, call, state.storage, lease)
            yield from self._after(state, process, outcome, "")
            if not faults:
                continue
            if "lost-answer" in kinds and outcome.annotations not in (None, lease.annotations) and not lease.is_cut:
                unanswered = self.trainers.advance(process, call, state.storage, lease._replace(is_answer_lost=True))
                yield from self._after(state, process, unanswered, ", and the answer is lost", cost=1)
            if "blind" in kinds and outcome.access == "looks for newer attempts":
                blind = self.trainers.advance(process, call, state.storage, lease, is_blind=True)
                yield from self._after(state, process, blind, ", and cannot read the folder", cost=1)
            if "die" in kinds and outcome.access == "removes released commits":
                dead = self.trainers.advance(process, call, state.storage, lease, dies=True)
                yield from self._after(state, process, dead, ", and dies in the middle", cost=1)
        # A process that no kubelet reports on might as well never do anything again.
        pod = self.objects(state).pod(process.attempt)
        if faults and "die" in kinds and pod is not None and pod.node not in state.lost:
            dead_state = self._with_process(state, process.attempt, exit_code=1)
            name = f"the process of attempt {process.attempt} dies"
            yield Step(name, self._report_exit(dead_state, process.attempt)._replace(faults=faults - 1), is_fault=True)

    def _after(self, state: State, process: Process, outcome: Any, how: str, *, cost: int = 0) -> Iterator[Step]:
        after = self._replace_process(state, outcome.process)._replace(
            storage=outcome.storage, faults=state.faults - cost
        )
        objects = self.objects(state)
        if outcome.annotations is not None and outcome.annotations != objects.lease(process.attempt):
            after = self._with_objects(after, objects.with_lease(process.attempt, outcome.annotations))
        name = f"attempt {process.attempt} {outcome.access}{how}"
        if outcome.process.exit_code is not None:
            name = f"{name}, and exits with code {outcome.process.exit_code}"
            after = self._report_exit(after, process.attempt)
        if after != state:
            yield Step(name, after, is_fault=bool(cost))

    def _report_exit(self, state: State, attempt: int) -> State:
        """Let the kubelet report the end of a process, if it can."""
        objects = self.objects(state)
        pod = objects.pod(attempt)
        process = next(item for item in self.processes(state) if item.attempt == attempt)
        if pod is None or pod.node in state.lost:
            return state
        failed = pod._replace(phase="Failed", exit_code=process.exit_code)
        return self._with_objects(state, objects.with_pod(attempt, WORKER, failed))

    def _with_process(self, state: State, attempt: int, *, exit_code: int) -> State:
        processes = self.processes(state)
        found = next((item for item in processes if item.attempt == attempt), None)
        if found is None or found.exit_code is not None:
            return state
        return self._replace_process(state, Process(attempt, found.environment, exit_code=exit_code))

    def _replace_process(self, state: State, process: Process) -> State:
        if process.exit_code is not None:
            process = Process(process.attempt, process.environment, exit_code=process.exit_code)
        processes = tuple(process if item.attempt == process.attempt else item for item in self.processes(state))
        return state._replace(processes=self._processes.number(processes))

    def _with_objects(self, state: State, objects: Objects) -> State:
        return state._replace(objects=self._objects.number(objects))

    # -- faults ---------------------------------------------------------------------------------------------------

    def _recover(self, state: State) -> Iterator[Step]:
        for attempt in sorted(state.cut):
            yield Step(f"attempt {attempt} reaches the API server again", state._replace(cut=state.cut - {attempt}))
        status = self.status(state)
        if status.phase == Phase.FAILED and status.reason in ASKING and not state.word:
            name = commit_history.parse_commit_name(status.checkpoint.history[0].uri)
            yield Step(f"a person lets the job go on from {name}", state._replace(word=name))
            yield Step("a person lets the job begin from nothing", state._replace(word=BEGINNING))
        if state.reader:
            yield Step("the other job has started", state._replace(reader=""))
        objects = self.objects(state)
        if objects.lease(FORMER) is not None:
            without = objects._replace(
                leases=tuple(item for item in objects.leases if item[0] != FORMER),
                rights=tuple(attempt for attempt in objects.rights if attempt != FORMER),
            )
            yield Step("the former job is deleted; its processes go on", self._with_objects(state, without))
        if "return" in self.scenario.kinds:
            for node in sorted(state.lost):
                yield Step(f"{node} reports again", self._return_node(state, node))

    def _return_node(self, state: State, node: str) -> State:
        """Let a node report again; its kubelet stops the processes whose pods do not exist any more."""
        after = state._replace(lost=state.lost - {node})
        for process in self.processes(state):
            if self.objects(state).pod(process.attempt) is None:
                after = self._with_process(after, process.attempt, exit_code=137)
        return after

    def _fail(self, state: State) -> Iterator[Step]:
        kinds, less = self.scenario.kinds, state._replace(faults=state.faults - 1)
        alive = [process.attempt for process in self.processes(state) if process.exit_code is None]
        first = self.objects(state).pod(1)
        if "power" in kinds and first is not None and first.node not in state.lost:
            dead = self._with_process(less._replace(lost=state.lost | {first.node}), 1, exit_code=137)
            yield Step(f"{first.node}, the node of attempt 1, loses its power", dead, is_fault=True)
        if "lose" in kinds:
            for pod in self.objects(state).pods:
                may_be_lost = pod.attempt == 1 or "return" not in kinds  # else the nodes take turns
                if pod.role == WORKER and pod.node not in state.lost and may_be_lost:
                    name = f"{pod.node}, the node of attempt {pod.attempt}, stops reporting; its processes go on"
                    lost = less._replace(lost=state.lost | {pod.node})
                    yield Step(name, lost, is_fault=True)
                    if "cut" in kinds and pod.attempt not in state.cut:
                        name = f"{name}, and cannot reach the API server"
                        yield Step(name, lost._replace(cut=state.cut | {pod.attempt}), is_fault=True)
        if "cut" in kinds:
            for attempt in alive:
                if attempt not in state.cut:
                    name = f"attempt {attempt} loses the API server"
                    yield Step(name, less._replace(cut=state.cut | {attempt}), is_fault=True)
        if "rival" in kinds and self.root.document(state.storage, OWNER_FILE).get("uid") != RIVAL_UID:
            self.root.mount(state.storage)
            with contextlib.suppress(NotOwnerError):
                takeover.take_root_over(self.root.folder, uid=RIVAL_UID, job="ns/rival")
                after = less._replace(storage=self.root.read())
                yield Step("a third job takes the root over", after, is_fault=True)
        newest = self.status(state).checkpoint.uri
        if "reader" in kinds and not state.reader and newest:
            yield Step(f"another job is created that starts from {newest}", less._replace(reader=newest), is_fault=True)
        if "drain" in kinds and not state.drain:
            yield Step("a user requests a drain", less._replace(drain="1"), is_fault=True)


def make_spec(mount: str, scenario: Scenario) -> dict[str, Any]:
    """Return the spec of a job that runs on one node."""
    return {
        "accelerator": {"resource": GPU, "perNode": sorted(set(scenario.gpus.values()))},
        "nodes": {"min": 1, "max": 1},
        "parallelism": {"tensor": [1], "pipeline": [1]},
        "batch": {"globalSamples": 4, "microSamples": 1},
        "checkpoint": {
            "claimName": CLAIM,
            "path": PATH,
            "intervalSeconds": 60,
            "takeOver": "Resume" if scenario.takes_over else "Never",
        },
        "recovery": {"restartBudget": {"limit": 100, "windowSeconds": 3600}},
        "template": {
            "spec": {
                "containers": [
                    {"name": "train", "image": "image", "volumeMounts": [{"name": "ckpt", "mountPath": mount}]}
                ],
                "volumes": [{"name": "ckpt", "persistentVolumeClaim": {"claimName": CLAIM}}],
            }
        },
    }


def describe_action(action: Action) -> str:
    """Name an action and its object."""
    which = getattr(action, "name", "") or getattr(action, "lease", "") or getattr(action, "attempt", "")
    more = " ".join(getattr(action, "names", ()))
    return " ".join(str(word) for word in (type(action).__name__, which, more) if word)


def leave_out_what_is_for_people(status: Status) -> Status:
    """Return the status without fields on which no decision of the protocol depends; they would multiply the states."""
    last = tuple(
        dataclasses.replace(item, message="", cause="", seconds={}, conversion=None) for item in status.changes[-1:]
    )
    is_pause = status.changes[-1:] == status.pauses[-1:]
    is_reason_kept = status.phase in (Phase.WAITING, Phase.FAILED)
    return dataclasses.replace(
        status,
        conditions=(),
        message="",
        reason=status.reason if is_reason_kept else "",
        goodput={},
        plan=None,
        recoveries=() if is_pause else last,
        pauses=last if is_pause else (),
        progress=None,
        restart_budget=type(status.restart_budget)(),
        failure_counts=(),  # any pause after repeated failures may be over
        nodes_text="",
        ettr_text="",
    )
