"""One rank of Megatron-FSDP on CPU: train and save weights as `fsdp_dtensor`, or load them and compute a loss.

What Megatron-FSDP asks of a GPU besides what `megatron_rank` answers (streams, events, a mesh of `cuda`) is answered
here. Its optimizer's states are not saved: with torch's Adam, ranks have states of different parameters.
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
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_fp8_extra_state_case  # noqa: E402


def weights_of(wrapped):
    """Return the state dict of the weights as Megatron-LM saves it, for a model without gated layers."""
    weights = wrapped.state_dict_for_save_checkpoint()
    handle_fp8_extra_state_case(weights)
    state = {"model": dict(weights)}
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def do(run):
    """Losses of two steps before a checkpoint is saved and one after it, or of one after it is loaded."""
    torch.manual_seed(run["seed"])
    config, model = build(1, VOCABULARY, torch.float32, training=True, gated_linear_unit=False)
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
        state = weights_of(wrapped)
        dcp.load(state, checkpoint_id=run["load"])
        wrapped.load_state_dict(state["model"], strict=False)
        return [step()]
    losses = [step(), step()]
    state = weights_of(wrapped)
    dcp.save(state, checkpoint_id=run["save"])
    return [*losses, step()]


def main() -> None:
    """Do the runs of `sys.argv[1]`, one after the other."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    initialize_rng_tracker(inference_rng_tracker=True)
    parallel_state.initialize_model_parallel()
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
