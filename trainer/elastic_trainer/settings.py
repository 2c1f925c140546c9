"""Settings of a training process from the environment. No other module of the package reads the environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer.errors import ConfigurationError
from reshard.contract import Env, TakeOver
from reshard.errors import TopologyError
from reshard.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one training process.

    Attributes:
        job: name of the ElasticTrainingJob; empty without a cluster.
        namespace: its namespace.
        attempt: number of this launch.
        topology: degrees of parallelism of this launch.
        has_topology: the environment says the topology; otherwise it is only a default.
        global_batch: samples per optimizer step; 0 if the script chooses.
        micro_batch: samples per micro step; 0 if the script chooses.
        checkpoint_root: folder of all attempts' checkpoints.
        checkpoint_interval_seconds: time between commits; 0 for no regular commits.
        resume: folder of the commit to resume from; None for a first start.
        lease: name of the attempt's Lease; empty without a cluster.
        mailbox: file that replaces the Lease without a cluster, or None.
        heartbeat_seconds: time between renewals.
        rank: global rank of this process.
        local_rank: rank on this machine.
        api_server: host and port of the Kubernetes API server.
        local_world_size: processes of this attempt on this machine; 1 if the launcher does not set it.
        scratch: folder in memory for temporary files while a commit is loaded.
        async_saves: save asynchronously.
        staging: folder on this node, in memory or on a local disk, for the files of asynchronous saves.
        staging_bytes: largest size of one node's part of an asynchronous save; 0 for no bound but the free space.
        job_uid: UID of the ElasticTrainingJob, which owns `checkpoint_root`; empty without a cluster.
        take_over: this attempt may take `checkpoint_root` over from another job (`TakeOver.BEGIN`).
    """

    job: str
    namespace: str
    attempt: int
    topology: Topology
    global_batch: int
    micro_batch: int
    checkpoint_root: Path
    checkpoint_interval_seconds: float
    resume: Path | None
    lease: str
    mailbox: Path | None
    heartbeat_seconds: float
    rank: int
    local_rank: int
    api_server: tuple[str, int]
    has_topology: bool = True
    local_world_size: int = 1
    scratch: Path = Path("/dev/shm")
    async_saves: bool = False
    staging: Path = Path("/dev/shm")
    staging_bytes: int = 0
    job_uid: str = ""
    take_over: bool = False


def from_env(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the environment; a plain `python train.py` without variables is one process of attempt 1.

    Raises:
        ConfigurationError: names every invalid variable, with what was expected and found.
    """
    env = os.environ if environment is None else environment
    problems: list[str] = []

    def number(name: str, default: float) -> float:
        text = env.get(name) or str(default)
        try:
            return float(text)
        except ValueError:
            problems.append(f"{name}={text!r}: expected a number")
            return default

    world_size = int(number("WORLD_SIZE", 1))
    topology = Topology(dp=max(1, world_size))
    if text := env.get(Env.TOPOLOGY):
        try:
            topology = Topology.from_json(text) if text.lstrip().startswith("{") else Topology.parse(text)
        except TopologyError as error:
            problems.append(f"{Env.TOPOLOGY}: {error}")
    if topology.world_size != world_size:
        problems.append(
            f"{Env.TOPOLOGY} is {topology}, pp({topology.pp}) * dp({topology.dp}) * tp({topology.tp}) = "
            f"{topology.world_size}, but WORLD_SIZE is {world_size}"
        )
    resume, mailbox = env.get(Env.RESUME), env.get(Env.MAILBOX)
    scratch = Path(env.get("ETJ_SCRATCH") or "/dev/shm")
    settings = Settings(
        job=env.get(Env.JOB, ""),
        namespace=env.get(Env.NAMESPACE, "default"),
        attempt=int(number(Env.ATTEMPT, 1)),
        topology=topology,
        has_topology=bool(env.get(Env.TOPOLOGY)),
        global_batch=int(number(Env.GLOBAL_BATCH, 0)),
        micro_batch=int(number(Env.MICRO_BATCH, 0)),
        checkpoint_root=Path(env.get(Env.CHECKPOINT_ROOT) or "checkpoints"),
        checkpoint_interval_seconds=number(Env.CHECKPOINT_INTERVAL_SECONDS, 0),
        resume=Path(resume) if resume else None,
        lease=env.get(Env.LEASE, ""),
        mailbox=Path(mailbox) if mailbox else None,
        heartbeat_seconds=number(Env.HEARTBEAT_SECONDS, 10),
        rank=int(number("RANK", 0)),
        local_rank=int(number("LOCAL_RANK", 0)),
        local_world_size=max(1, int(number("LOCAL_WORLD_SIZE", 1))),
        scratch=scratch,
        async_saves=env.get("ETJ_ASYNC_SAVES", "") == "true",
        staging=Path(env.get("ETJ_STAGING") or scratch),
        staging_bytes=int(number("ETJ_STAGING_BYTES", 0)),
        job_uid=env.get(Env.JOB_UID, ""),
        take_over=env.get(Env.TAKE_OVER, "") == TakeOver.BEGIN,
        # Kubernetes sets these variables in every container, so that no cluster DNS is needed.
        api_server=(
            env.get("KUBERNETES_SERVICE_HOST") or "kubernetes.default.svc",
            int(number("KUBERNETES_SERVICE_PORT_HTTPS", 443)),
        ),
    )
    if problems:
        raise ConfigurationError("; ".join(problems))
    return settings


def with_degrees(settings: Settings, *, tp: int, zero: int | None) -> Settings:
    """Return settings with the script's own degrees, for a launch of which the environment says no topology.

    Raises:
        ConfigurationError: the ranks are not a multiple of `tp`.
    """
    ranks = settings.topology.world_size
    if tp < 1 or ranks % tp:
        raise ConfigurationError(f"{ranks} ranks are not a multiple of tp={tp}: start more ranks, or choose another tp")
    stage = settings.topology.zero if zero is None else zero
    return dataclasses.replace(settings, topology=Topology(tp=tp, dp=ranks // tp, zero=stage))
