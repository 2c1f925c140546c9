"""Make the tiny Megatron-Core checkpoints beside this file again: `python -m tests.golden.make_megatron [NAME ...]`.

Needs megatron-core 0.16.1 beside torch; no GPU. A GPT of two layers with grouped queries, a gated MLP and RMS norms is
built by Megatron-Core with tensor parallelism over two processes, trained for three steps of torch's AdamW, and saved
by `dist_checkpointing.save`; the optimizer's states go through Megatron-Core's own helpers, with the keys of
`--dist-ckpt-optim-fully-reshardable`. What each full tensor is goes to `truth.json`, put together from the ranks'
weights by what Megatron-Core's layers say of themselves (`partition_dim`), not by its checkpoint code.

`buckets-tp2` is what the distributed optimizer itself saves as `dp_reshardable`, in several buckets. `buckets-experts`
is what the two optimizers of a model with experts save, at ep=2, in two pipeline stages of two virtual ones. What their
full tensors are is read by torch from a folder of the same run with one bucket, saved as `fully_reshardable`.

`fsdp-dtensor-dp2` is what Megatron-FSDP saves, on two ranks. What its full tensors are is read by torch.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load

from tests.engine.reshard_run import launch

HERE = Path(__file__).parent / "megatron-0.16.1"
TP, LAYERS, HIDDEN, FFN, STEPS = 2, 2, 8, 6, 3


def build(config_type, model_type, spec):
    config = config_type(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=FFN,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=TP,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    return model_type(
        config,
        spec(normalization="RMSNorm"),
        vocab_size=12,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )


def whole(name, weight, value):
    """The full tensor of a rank's part, by the attributes that Megatron-Core's layers set."""
    if not getattr(weight, "tensor_model_parallel", False):
        return value
    parts = [torch.empty_like(value) for _ in range(TP)]
    torch.distributed.all_gather(parts, value.contiguous())
    if name.endswith("linear_fc1.weight"):  # gate and up of each rank, one behind the other
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[at] for at in (0, 1) for half in halves])
    return torch.cat(parts, dim=weight.partition_dim)


def rank_main(rank, store):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(TP), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    torch.cuda.synchronize = lambda *_: None  # the only two things for which it wants a GPU while saving
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=TP)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import optimizer as helpers
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
    torch.manual_seed(3)
    model = build(TransformerConfig, GPTModel, get_gpt_layer_local_spec)
    weights = dict(model.named_parameters())
    for weight in weights.values():
        torch.nn.init.normal_(weight)
        if not getattr(weight, "tensor_model_parallel", False):
            torch.distributed.broadcast(weight.data, 0)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator)
            if not getattr(weight, "tensor_model_parallel", False):
                torch.distributed.broadcast(weight.grad, 0)
        optimizer.step()

    states = optimizer.state_dict()
    for group in states["param_groups"]:
        group["step"] = STEPS  # as DistributedOptimizer.state_dict does
    sharded = model.sharded_state_dict(metadata={})
    by_id = helpers.get_param_id_to_sharded_param_map(model.sharded_state_dict(metadata={}), model.parameters())
    helpers.optim_state_to_sharding_state(states, by_id, exclude_keys=("step", "exp_avg_sq"))
    for at, item in by_id.items():
        states["state"][at]["fp32_param"] = helpers.make_sharded_optimizer_tensor(
            item, item.data.detach() * 1.5, "optimizer.state.fp32_param"
        )
    arguments = argparse.Namespace(
        tensor_model_parallel_size=TP, pipeline_model_parallel_size=1, data_parallel_size=1, consumed_train_samples=96
    )
    common = {"args": arguments, "iteration": STEPS, "checkpoint_version": 3.0}
    folder = HERE / "iter_0000003"
    dist_checkpointing.save({"model": sharded, "optimizer": states, **common}, str(folder))

    found = {}
    for name, weight in weights.items():
        values = {"weight": weight, "fp32": weight * 1.5, "exp_avg": optimizer.state[weight]["exp_avg"]}
        for state, value in values.items():
            full = whole(name, weight, value.detach())
            content = full.contiguous().numpy().tobytes()
            found[f"{state}/{name}"] = {"shape": list(full.shape), "sha256": hashlib.sha256(content).hexdigest()}
    if rank == 0:
        (HERE / "truth.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    torch.distributed.barrier()


BUCKETS = {
    "buckets-tp2": {"tp": TP, "topology": f"tp={TP},dp=1", "bf16": True, "model": {}},
    "buckets-experts": {
        "tp": 1, "pp": 2, "vp": 2, "ep": 2, "topology": "pp=2,dp=2", "bf16": True,
        "model": {
            "num_layers": 4, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 6,
            "moe_shared_expert_intermediate_size": 10, "moe_layer_freq": [0, 1, 1, 1],
            "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2, "pipeline_dtype": "bfloat16",
        },
    },
}  # fmt: skip


def read_with_torch(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder by their keys."""
    reader = FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if hasattr(entry, "size")
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def make_buckets(name: str) -> None:
    """Make a folder with states in buckets."""
    with tempfile.TemporaryDirectory() as scratch:
        whole, folder = Path(scratch) / "whole", HERE / name / "iter_0000003"
        run = {"kind": "states", **BUCKETS[name]}
        saves = [{"fully_reshardable": str(whole)}, {"dp_reshardable": str(folder)}]
        runs = [
            {**run, "name": "whole", "save": saves[0]},
            {**run, "name": "cut", "save": saves[1], "bucket_size": 300},
        ]
        launch(runs, HERE.parents[1] / "engine" / "megatron_rank.py")
        found = read_with_torch(whole)
    truth = {}
    for key, value in found.items():
        state, name_in_model = (
            key.removeprefix("optimizer.state.").split(".", 1) if "optimizer" in key else ("weight", key)
        )
        parts = {name_in_model: value}
        if "layers." in name_in_model and not re.search(r"layers\.\d", name_in_model):
            parts = {name_in_model.replace("layers.", f"layers.{at}."): part for at, part in enumerate(value)}
        for own, part in parts.items():
            content = part.contiguous().view(torch.uint8).numpy().tobytes()
            shown = {"shape": list(part.shape), "sha256": hashlib.sha256(content).hexdigest()}
            truth[f"{'fp32' if state == 'param' else state}/{own}"] = shown
    (HERE / name / "truth.json").write_text(json.dumps(truth, indent=1, sort_keys=True) + "\n")


FSDP = "fsdp-dtensor-dp2"


def make_fsdp() -> None:
    """Make a folder of Megatron-FSDP."""
    folder = HERE / FSDP / "iter_0000002"
    run = {"name": "saved", "topology": "dp=2", "seed": 3, "save": str(folder)}
    launch([run], HERE.parents[1] / "engine" / "megatron_fsdp_rank.py")
    truth = {}
    for key, value in read_with_torch(folder).items():
        kind, name = key.split(".", 1)
        name = name.removeprefix("state.module.")  # the wrapper that only the optimizer has in its names
        name, _, state = name.rpartition(".") if kind == "optimizer" else (name, "", "weight")
        if state != "step":
            content = value.contiguous().view(torch.uint8).numpy().tobytes()
            shown = {"shape": list(value.shape), "sha256": hashlib.sha256(content).hexdigest()}
            truth[f"{state}/{name}"] = shown
    (HERE / FSDP / "truth.json").write_text(json.dumps(truth, indent=1, sort_keys=True) + "\n")


def make_whole() -> None:
    """Make the folder with whole states."""
    (HERE / "iter_0000003").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(rank_main, args=(f"{scratch}/store",), nprocs=TP)


def main() -> None:
    """Make all, or those named on the command line."""
    for name in sys.argv[1:] or ("iter_0000003", *BUCKETS, FSDP):
        shutil.rmtree(HERE / name, ignore_errors=True)
        if name == FSDP:
            make_fsdp()
        elif name in BUCKETS:
            make_buckets(name)
        else:
            make_whole()


if __name__ == "__main__":
    main()
