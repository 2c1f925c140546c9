"""DeepSpeed's engine in a training loop of the script's own.

`initialize` takes the place of `deepspeed.initialize`, loads the commit, and returns the engine and the run:

    engine, run = initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for step in run.steps(num_steps):
        ...                                    # engine(...), engine.backward(loss), engine.step()
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.batch import BatchPlan
from elastic_trainer.errors import ConfigurationError
from elastic_trainer.session import Session
from elastic_trainer.stacks.loop import Run
from reshard.topology import Topology

Config = Mapping[str, Any] | str | Path
"""DeepSpeed's configuration, or the path of its JSON file."""

_SIZES = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")


def initialize(
    *,
    config: Config,
    seed: int = 0,
    keep: int = 3,
    client_state: Mapping[str, Any] | None = None,
    commit_model: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> tuple[Any, Run]:
    """Start the attempt, build the engine for its topology, and load the commit that the operator chose.

    Args:
        config: the script's configuration. `fill_config` says what of it is replaced.
        seed: see `Run`.
        keep: see `Session`.
        client_state: saved with every checkpoint; for tp > 1 with `universal_checkpoint_info`, for a PipelineModule
            with `pipeline_layout` (see docs/trainer.md).
        commit_model: see `Session.save`, argument `model`.
        **arguments: of `deepspeed.initialize`, all but `config`.

    Raises:
        ConfigurationError: batch sizes do not fit the replicas, nothing tells DeepSpeed of tp or pp, or the
            configuration has no ZeRO stage that is a number.
    """
    import deepspeed
    from torch import distributed

    values = _read_config(config)
    session = Session.from_env(keep=keep, zero=_zero_stage(values))
    topology = session.topology
    _check_degrees(topology, values, arguments)
    plan = _batch_plan(session, values)
    if not distributed.is_initialized():
        deepspeed.init_distributed()
    session.start()
    run = Run(session, plan, seed=seed)
    engine, *_ = deepspeed.initialize(config=fill_config(values, topology, plan), **arguments)
    attach(run, engine, client_state=client_state, commit_model=commit_model)
    return engine, run


def fill_config(config: Mapping[str, Any], topology: Topology, plan: BatchPlan) -> dict[str, Any]:
    """Return the configuration with everything that depends on the attempt: batch sizes, accumulation, ZeRO stage.

    If the configuration has `tensor_parallel` (AutoTP), its degree is replaced, too, and `train_batch_size` is left
    out if the degree is above 1: DeepSpeed 0.19.8 compares it with a product that counts every rank as a replica
    (runtime/config.py). `attach` sets it afterwards.

    >>> from elastic_trainer import BatchPlan
    >>> filled = fill_config({}, Topology(dp=2, zero=2), BatchPlan(global_batch=8, micro_batch=2, dp=2))
    >>> filled["gradient_accumulation_steps"], filled["zero_optimization"]
    (2, {'stage': 2})
    """
    filled = {
        **config,
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "zero_optimization": {**config.get("zero_optimization", {}), "stage": topology.zero},
    }
    if "tensor_parallel" in config:
        filled["tensor_parallel"] = {**config["tensor_parallel"], "autotp_size": topology.tp}
        if topology.tp > 1:
            del filled["train_batch_size"]
    return filled


def attach(
    run: Run,
    engine: Any,
    *,
    client_state: Mapping[str, Any] | None = None,
    commit_model: Mapping[str, Any] | None = None,
) -> None:
    """Load the commit into an engine, let the run save with it, and take losses from `backward` and `train_batch`.

    `initialize` does this; call it yourself if something else builds the engine.
    """

    def save(folder: Path, tag: str) -> None:
        engine.save_checkpoint(str(folder), tag=tag, client_state=dict(client_state or {}))

    def load(folder: Path) -> None:
        path, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if path is None:  # DeepSpeed only warns
            raise ConfigurationError(f"DeepSpeed found no checkpoint in {folder}: its log says why")

    if engine.train_batch_size() != run.plan.global_batch:  # see `fill_config`
        engine.set_train_batch_size(run.plan.global_batch)
    run.restore(load=load, save=save, format_="deepspeed", model=commit_model)
    _note_losses(run, engine)


def _note_losses(run: Run, engine: Any) -> None:
    backward = engine.backward

    def backward_and_note(loss: Any, *arguments: Any, **options: Any) -> Any:
        run.report(loss)
        return backward(loss, *arguments, **options)

    if hasattr(engine, "train_batch"):  # a PipelineEngine, whose train_batch returns the loss of the global batch
        train_batch = engine.train_batch

        def train_and_note(*arguments: Any, **options: Any) -> Any:
            loss = train_batch(*arguments, **options)
            run.report(float(loss))
            return loss

        engine.train_batch = train_and_note
    else:
        engine.backward = backward_and_note


def _read_config(config: Config) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    values: dict[str, Any] = json.loads(Path(config).read_text(encoding="utf-8"))
    return values


def _zero_stage(config: Mapping[str, Any]) -> int:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in range(4):
        raise ConfigurationError(f"zero_optimization.stage in DeepSpeed's settings: expected 0 to 3, found {stage!r}")
    return int(stage)


def _batch_plan(session: Session, config: Mapping[str, Any]) -> BatchPlan:
    """Return the operator's batch sizes, or the script's, which its configuration says as DeepSpeed's would."""
    micro, whole, steps = (_number(config, name) for name in _SIZES)
    steps = max(steps, 1)
    replicas = session.topology.num_replicas
    return session.batch_plan(
        global_batch=whole or max(micro, 1) * steps * replicas,
        micro_batch=micro or max(1, whole // (steps * replicas)),
    )


def _number(config: Mapping[str, Any], name: str) -> int:
    """Return a number of the configuration; 0 if it is left out or `auto`."""
    value = config.get(name)
    return value if isinstance(value, int) else 0


def _check_degrees(topology: Topology, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse a topology of which nothing tells DeepSpeed: it would train tp * dp replicas instead."""
    knows_pipeline = any(base.__name__ == "PipelineModule" for base in type(arguments.get("model")).__mro__)
    knows_tensor = "tensor_parallel" in config or arguments.get("mpu") is not None or knows_pipeline
    if topology.pp > 1 and not knows_pipeline:
        raise ConfigurationError(f"the topology is {topology}: pp > 1 needs a PipelineModule as model")
    if topology.tp > 1 and not knows_tensor:
        raise ConfigurationError(
            f"the topology is {topology}: tp > 1 needs `tensor_parallel` in the configuration, or an mpu"
        )
