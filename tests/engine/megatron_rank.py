"""One rank of real Megatron-Core on CPU: train and save, load and train on, load and compute logits, or hold weights.

Megatron-Core wants a GPU by name only; what it asks of one is answered for the CPU. Its distributed optimizer expects
Adam of TransformerEngine or Apex, which counts steps by group: with torch's, which counts by parameter, its loader
leaves the counts out and makes one tensor of them all, so they are given back here.
"""

import json
import os
import re
import sys
import zlib
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda self, *_, **__: self

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer.moe import experts, moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

moe_utils.te_general_gemm = None  # its router asks whether TransformerEngine has it, without which it is not defined

LENGTH, VOCABULARY, STEPS = 8, 12, 3
LLAMA = {"hidden_size": 32, "ffn_hidden_size": 48}
GLOBAL_BATCH = 4
"""Sizes and batch of the Llama that `family_rank` trains with DeepSpeed."""
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


class OnCpu(TorchFunctionMode):
    """Mode that makes tensors on the CPU where a caller asks for `cuda`."""

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(arg, str | torch.device) and "cuda" in str(arg) else arg for arg in args)
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states_and_step(self, parameter, tensors):
    group, at = self.model_param_group_index_map[parameter]
    settings = self.optimizer.param_groups[group]
    step = torch.tensor(float(settings["step"]))
    self.optimizer.state[settings["params"][at]]["step"] = step.clone()
    _set_states(self, parameter, {**tensors, "step": step})


DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_and_step


def build(tp, vocabulary, dtype, *, training, tied=True, positions="rope", chunk=None, **more):
    """A GPT like Llama, or its `chunk`; its sizes are those of the golden checkpoints, if not given."""
    kind = {"num_experts": more.get("num_moe_experts"), "moe_grouped_gemm": more.get("moe_grouped_gemm", False)}
    kinds = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, **more}
    sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 6, **kinds, "pipeline_dtype": dtype}
    config = TransformerConfig(
        num_attention_heads=4,
        num_query_groups=2,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **sizes,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            normalization=kinds["normalization"], qk_layernorm=more.get("qk_layernorm", False), **kind
        ),
        vocab_size=vocabulary,
        max_sequence_length=2 * LENGTH,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=tied,
        parallel_output=training,  # its loss takes each rank's part of the logits
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
    )
    return config, model.to(dtype)


def weights(run, tp):
    """Sums over all ranks' weights, in order, of a model that is saved, or loaded with all checks on."""
    torch.manual_seed(3)
    experts.gg.assert_grouped_gemm_is_available = lambda: None  # what multiplies: nothing is multiplied here
    _, model = build(tp, VOCABULARY, torch.float32, training=False, **run["model"])
    chance = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    for weight in model.parameters():
        weight.data.normal_(generator=chance)
    state = {"model": model.sharded_state_dict(metadata={})}
    if "save" in run:
        Path(run["save"]).mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save({**state, "iteration": STEPS, "checkpoint_version": 3.0}, run["save"])
    else:
        model.load_state_dict(dist_checkpointing.load(state, run["load"], strict="raise_all")["model"])
    place = torch.arange(1, 1 << 12, dtype=torch.float64)
    own = [float((value.double().flatten() * place[: value.numel()]).sum()) for value in model.parameters()]
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    return [value for values in every for value in values]


def forward(model, tokens, **labels):
    """Logits, or losses with labels."""
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    return model(tokens, torch.arange(length)[None].expand_as(tokens), mask, **labels)


def logits(run, tp):
    """Of the model in `run["load"]`, with all of Megatron-Core's checks on."""
    _, model = build(tp, run["vocabulary"] + run["vocabulary"] % tp, torch.float32, training=False)
    state = {"model": model.sharded_state_dict(metadata={})}
    model.load_state_dict(dist_checkpointing.load(state, run["load"], strict="raise_all")["model"])
    tokens = torch.arange(8).reshape(2, 4) % run["vocabulary"]
    with torch.no_grad():
        return forward(model.eval(), tokens)[..., : run["vocabulary"]].flatten().tolist()


def train(run, tp):
    """Losses of three steps, after those of the checkpoint that is loaded, or after three that are saved."""
    torch.manual_seed(3)
    config, model = build(tp, VOCABULARY, torch.bfloat16, training=True)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=True)
    tokens = torch.arange(LENGTH)[None]

    def step():
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = forward(wrapped, tokens, labels=(tokens + 1) % VOCABULARY).float().mean()
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        return loss.item()

    def state(**loading):
        found = model.sharded_state_dict(metadata={})
        return {"model": found, "optimizer": optimizer.sharded_state_dict(found, metadata=CONTENT, **loading)}

    if "save" in run:
        for _ in range(STEPS):
            step()
        Path(run["save"]).mkdir(parents=True, exist_ok=True)
        common = {"iteration": STEPS, "checkpoint_version": 3.0}
        dist_checkpointing.save({**state(), **common}, run["save"], content_metadata=CONTENT)
    else:
        step()  # torch's Adam has no state before
        loaded = dist_checkpointing.load(state(is_loading=True), run["load"], strict="raise_all")
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    return [step() for _ in range(STEPS)]


def batch(step, replica, replicas):
    """The tokens that `family_rank` gives to a replica."""
    generator = torch.Generator().manual_seed(1000 + step)
    each = GLOBAL_BATCH // replicas
    return torch.randint(3, 64, (GLOBAL_BATCH, 12), generator=generator)[replica * each : (replica + 1) * each]


def make_parts(run, tp, vocabulary, **settings):
    """Build the model's chunks, of which a rank has several with virtual stages, their buffers, and an optimizer."""
    torch.manual_seed(run.get("seed", 3))
    dtype = torch.bfloat16 if run.get("bf16") else torch.float32
    buckets = {"bucket_size": run["bucket_size"], "overlap_grad_reduce": True} if "bucket_size" in run else {}
    kinds = DistributedDataParallelConfig(use_distributed_optimizer=True, **buckets)
    models, wrapped = [], []
    for chunk in range(run["vp"]) if "vp" in run else [None]:
        kind = {"tied": run.get("tied", False), "chunk": chunk, **run.get("model", {})}
        config, model = build(tp, vocabulary, dtype, training=True, **kind)
        models.append(model)
        wrapped.append(DistributedDataParallel(config, kinds, model, disable_bucketing=bool(chunk)))
    kind = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=bool(run.get("bf16")), params_dtype=dtype, use_distributed_optimizer=True,
        clip_grad=0.0, **settings,
    )  # fmt: skip
    return models, wrapped, get_megatron_optimizer(kind, wrapped, use_gloo_process_groups=True)


def shard(models, optimizer, content, **loading):
    """Return the state dict of all parts, as Megatron-LM names them."""
    names = ["model"] if len(models) == 1 else [f"model{at}" for at in range(len(models))]
    found = {name: model.sharded_state_dict(metadata={}) for name, model in zip(names, models, strict=True)}
    of_models = found if len(models) > 1 else found["model"]
    return {**found, "optimizer": optimizer.sharded_state_dict(of_models, metadata=content, **loading)}


def save(state, folder, step, content):
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({**state, "iteration": step, "checkpoint_version": 3.0}, folder, content_metadata=content)


def run_stages(wrapped, tokens):
    """Run a step of a pipeline, of one sequence after the other; the loss is on the last stage, and 0 on others."""

    def run_one(sequences, model):
        own = next(sequences)
        losses = forward(model, own[:, :-1], labels=own[:, 1:])
        return losses, lambda found: (found.float().mean(), {"loss": found.detach().float().mean()})

    every = get_forward_backward_func()(
        forward_step_func=run_one,
        data_iterator=[iter(tokens.split(1)) for _ in wrapped],
        model=wrapped,
        num_microbatches=len(tokens),
        seq_length=tokens.shape[1] - 1,
        micro_batch_size=1,
        forward_only=False,
    )
    return torch.stack([one["loss"] for one in every]).mean() if every else torch.zeros(())


def llama(run, tp):
    """Losses of the Llama that `family_rank` trains, from a checkpoint or from new weights."""
    run = {**run, "model": {**LLAMA, **run.get("model", {})}}
    models, wrapped, optimizer = make_parts(run, tp, 64, adam_beta2=0.95, weight_decay=0.1)
    content = {**CONTENT, "distrib_optim_sharding_type": run.get("sharding", "fully_reshardable")}
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def step(number):
        for group in optimizer.param_groups:  # as Megatron-Core's scheduler does: norms do not decay
            group["weight_decay"] = 0.1 * group["wd_mult"]
        for model in wrapped:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = batch(number, replica, replicas)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            loss = run_stages(wrapped, tokens)
        else:
            loss = forward(wrapped[0], tokens[:, :-1], labels=tokens[:, 1:]).float().mean()
            loss.backward()
        for model in wrapped:
            model.finish_grad_sync()
        optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return total.item() / (replicas * tp)

    done = 0
    if "load" in run:
        step(0)  # torch's Adam has no state before
        state = shard(models, optimizer, content, is_loading=True)
        loaded = dist_checkpointing.load(state, run["load"], strict="raise_all")
        for name, model in zip(state, models, strict=False):
            model.load_state_dict(loaded[name])
        optimizer.load_state_dict(loaded["optimizer"])
        done = dist_checkpointing.load_common_state_dict(run["load"])["iteration"]
    losses = []
    for number in range(done, done + run["steps"]):
        losses.append(step(number))
        if run.get("save") and number + 1 == run["save_at"]:
            save(shard(models, optimizer, content), run["save"], number + 1, content)
    return losses


def draw_gradients(model):
    """Draw each gradient by the name that the weight has in the whole model, and by the rank that has this part."""
    first_expert = parallel_state.get_expert_model_parallel_rank() * next(
        (len(module.local_experts) for module in model.modules() if hasattr(module, "local_experts")), 0
    )

    def name_in_model(name, weight):
        if getattr(weight, "shared_embedding", False):
            return "embedding.word_embeddings.weight"
        name = re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) + first_expert), name)
        return re.sub(
            r"(?<=decoder\.layers\.)\d+", lambda match: str(model.decoder.layers[int(match[0])].layer_number - 1), name
        )

    for name, weight in model.named_parameters():
        is_part = getattr(weight, "tensor_model_parallel", False)
        own = parallel_state.get_tensor_model_parallel_rank() if is_part else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name_in_model(name, weight)} {own}".encode()))
        weight.main_grad.normal_(generator=generator)


def states(run, tp):
    """Save states of an optimizer in each of `run["save"]`'s kinds; gradients are drawn by the name of the weight."""
    models, wrapped, optimizer = make_parts(run, tp, VOCABULARY)
    for _ in range(STEPS):
        for model, buffers in zip(models, wrapped, strict=True):
            buffers.zero_grad_buffer()
            draw_gradients(model)
        optimizer.step()
    for sharding, folder in run["save"].items():
        content = {**CONTENT, "distrib_optim_sharding_type": sharding}
        save(shard(models, optimizer, content), folder, STEPS, content)
    return []


def main() -> None:
    """Do the runs of `sys.argv[1]`, one after the other."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    initialize_rng_tracker(inference_rng_tracker=True)  # there is no dropout, and its states are of a GPU
    for run in task["runs"]:
        tp = run["tp"]
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=run.get("pp", 1),
            virtual_pipeline_model_parallel_size=run.get("vp"),
            expert_model_parallel_size=run.get("ep", 1),
            expert_tensor_parallel_size=run.get("etp"),
        )
        with OnCpu():
            values = {"logits": logits, "train": train, "weights": weights, "llama": llama, "states": states}[
                run["kind"]
            ](run, tp)
        if int(os.environ["RANK"]) == 0:
            with open(task["results"], "a") as file:
                print(json.dumps({"name": run["name"], "losses": values}), file=file)
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
