"""One rank of Megatron-FSDP on CPU: train and save as `fsdp_dtensor`, or load and train on.

What Megatron-FSDP asks of a GPU besides what `megatron_rank` answers (streams, events, a mesh of `cuda`) is answered
here. It expects Adam of TransformerEngine, which has states of all parameters. Torch's has none of parameters of which
a rank owns no elements, since they get no gradient, and ranks that save different states wait for each other for ever.
So the states of such parameters, which have no elements either, are added here.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))

from megatron_rank import VOCABULARY, OnCpu, build, forward, initialize_rng_tracker

from reshard.topology import Topology

CONTENT = {"distrib_optim_sharding_type": "fsdp_dtensor"}


class Nothing:
    """A stream, or an event of one: on the CPU everything is done in order."""

    def __init__(self, *_args, **_options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return False

    def record_event(self, *_args):
        return Nothing()

    def query(self):
        return True

    def _wait(self, *_args):
        pass

    wait_stream = wait_event = synchronize = record = wait = _wait


torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = torch.cuda.stream = Nothing
_make_mesh = DeviceMesh.__init__
DeviceMesh.__init__ = lambda self, _device, *args, **options: _make_mesh(self, "cpu", *args, **options)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel  # noqa: E402
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (  # noqa: E402
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.fsdp_dtensor_checkpoint import (  # noqa: E402
    handle_experts_in_state_dict,
    handle_fp8_extra_state_case,
    handle_swiglu_in_state_dict,
)


def states_of(wrapped, optimizer, **loading):
    """Return the state dict, and the one that is saved of it or loaded into it, with halves of gated layers apart.

    What takes the halves apart looks for weights in the outermost module, and for states in the one inside of it.
    """
    weights = dict(wrapped.state_dict_for_save_checkpoint())
    handle_fp8_extra_state_case(weights)
    optimizer.sharded_state_dict(weights, metadata=CONTENT, **loading)
    add_empty_states(optimizer)
    states = optimizer.sharded_state_dict(weights, metadata=CONTENT)
    of_model, _ = handle_swiglu_in_state_dict(wrapped, weights, None)
    of_model = handle_experts_in_state_dict(of_model, wrapped.config.num_moe_experts)
    _, of_optimizer = handle_swiglu_in_state_dict(wrapped.module, {}, states)
    halved = {"model": of_model, "optimizer": of_optimizer}
    return {"model": weights, "optimizer": states}, preprocess_state_dict_for_uneven_dtensor(halved)


def add_empty_states(optimizer):
    """Add states of parameters of which this rank owns no elements."""
    states = optimizer.optimizer.state
    step = next(own["step"] for own in states.values() if own)
    every = {}
    for parameter in (parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        every[parameter] = states[parameter] or {"step": step.clone(), **moments}
    states.clear()
    states.update(every)  # Megatron-FSDP goes through the states in their order, together with other ranks


def do(run):
    """Losses of two steps before a checkpoint is saved and three after it, or of three after it is loaded."""
    torch.manual_seed(run["seed"])
    config, model = build(1, VOCABULARY, torch.float32, training=True, **run.get("model", {}))
    kinds = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params",
        gradient_reduce_div_fusion=False,
    )  # fmt: skip
    wrapped = FullyShardedDataParallel(config, kinds, model, device=torch.device("cpu"))
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, params_dtype=torch.float32, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=True)
    tokens = torch.arange(8)[None]

    def step():
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = forward(wrapped, tokens, labels=(tokens + 1) % VOCABULARY).float().mean()
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        return loss.item()

    if "load" in run:
        whole, halved = states_of(wrapped, optimizer, is_loading=True)
        dcp.load(halved, checkpoint_id=run["load"])
        wrapped.load_state_dict(whole["model"], strict=False)
        optimizer.load_state_dict(whole["optimizer"])
        return [step() for _ in range(3)]
    losses = [step(), step()]
    dcp.save(states_of(wrapped, optimizer)[1], checkpoint_id=run["save"])
    return [*losses, *(step() for _ in range(3))]


def main() -> None:
    """Do the runs of `sys.argv[1]`, one after the other."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    initialize_rng_tracker(inference_rng_tracker=True)
    (ep,) = {Topology.parse(run["topology"]).ep for run in task["runs"]}
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    for run in task["runs"]:
        with OnCpu():
            losses = do(run)
        if int(os.environ["RANK"]) == 0:
            with open(task["results"], "a") as file:
                print(json.dumps({"name": run["name"], "losses": losses}), file=file)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
