"""One rank of a real DeepSpeed run for the reshard tests. Started by `reshard_run.launch`, never collected by pytest.

Reads a JSON task from argv: runs of one world size, each with its topology, what to load, how many steps, where to
save. Writes one JSON line per run: the global mean loss of every step.
"""

import functools
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt_deepspeed"))

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequences
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from model import (
    Embedding,
    GptConfig,
    build,
    parameter_groups,
    pipeline_description,
    project,
    universal_checkpoint_info,
    vocabulary_loss,
)

from reshard.topology import Topology

GLOBAL_BATCH = 12
OPTIONS = (
    *("topology", "model", "size", "frozen", "zero", "bf16", "fp16", "data_types"),
    *("optimizer", "configured", "inner", "single", "partial", "weights", "fresh"),
)
PIPELINES = {"pipeline", "moe-pipeline"}
SIZES = {
    "small": GptConfig(
        layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61, padded_vocabulary=64, sequence=16
    ),
    "tiny": GptConfig(layers=2, hidden=8, heads=4, kv_heads=2, ffn=6, vocabulary=13, padded_vocabulary=16, sequence=4),
}


class FlatModel(torch.nn.Module):
    """Without a pipeline, for ZeRO-2 and ZeRO-3: odd sizes, a buffer, a tied name and two parameter groups."""

    def __init__(self, config, *, gain=False):
        super().__init__()
        torch.manual_seed(5)
        hidden, inner = config.hidden - 1, config.ffn - 3
        self.embed = torch.nn.Embedding(config.vocabulary, hidden)
        torch.nn.init.normal_(self.embed.weight, std=0.1)
        self.up = torch.nn.Linear(hidden, inner)
        self.norm = torch.nn.LayerNorm(inner)
        self.down = torch.nn.Linear(inner, hidden)
        self.register_buffer("scale", torch.tensor([1.5, 2.0, 0.5]))
        if gain:
            self.gain = torch.nn.Parameter(torch.tensor([0.75]))
        self.head = torch.nn.Linear(hidden, config.vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        scale = self.scale[0] * self.gain if hasattr(self, "gain") else self.scale[0]
        hidden = hidden + self.down(torch.nn.functional.silu(self.norm(self.up(hidden)))) * scale
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def make_experts(hidden, experts, topology):
    """Make a layer of DeepSpeed's own experts: all ranks draw all of them, and keep their own. No token is dropped."""
    layer = MoE(hidden, torch.nn.Linear(hidden, hidden), experts, topology.ep, drop_tokens=False, use_rts=False)
    own = layer.deepspeed_moe.experts.deepspeed_experts
    part = topology.coordinate(int(os.environ["RANK"])).dp % topology.ep * len(own)
    for expert in range(experts):
        weight, bias = torch.randn(hidden, hidden) / hidden**0.5, torch.randn(hidden) / 10
        if part <= expert < part + len(own):
            own[expert - part].weight.data, own[expert - part].bias.data = weight, bias
    return layer


class MoeModel(FlatModel):
    """With two layers of DeepSpeed's own experts. No token is dropped, so that losses do not depend on the ranks."""

    def __init__(self, config, topology):
        super().__init__(config)
        torch.manual_seed(11)
        for number, experts in enumerate((4, 2)):
            setattr(self, f"moe{number}", make_experts(config.hidden - 1, experts, topology))

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        for layer in (self.moe0, self.moe1):
            hidden = hidden + layer(hidden)[0]
        hidden = hidden + self.down(torch.nn.functional.silu(self.norm(self.up(hidden)))) * self.scale[0]
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


class MoeBlock(torch.nn.Module):
    """A layer of a pipeline: a layer of experts, or a linear one; its first values depend on its number only."""

    def __init__(self, config, number, experts, topology):
        super().__init__()
        torch.manual_seed(13 + number)
        hidden = config.hidden
        self.norm = torch.nn.LayerNorm(hidden)
        self.moe = make_experts(hidden, experts, topology) if experts else torch.nn.Linear(hidden, hidden)

    def forward(self, hidden):
        value = self.moe(self.norm(hidden))
        return hidden + (value[0] if isinstance(value, tuple) else value)


def make_moe_pipeline(config, topology):
    """Make a PipelineModule with three layers of experts, of which a stage can have two, or none; and client state."""
    blocks = [LayerSpec(MoeBlock, config, at, experts, topology) for at, experts in enumerate((4, 0, 2, 4))]
    tied = TiedLayerSpec("embed", Embedding, config, tied_weight_attr="weight")
    head = TiedLayerSpec("embed", Embedding, config, forward_fn=project, tied_weight_attr="weight")
    layout = PipeDataParallelTopology(num_pp=topology.pp, num_dp=topology.dp)
    loss = vocabulary_loss(config)
    model = PipelineModule([tied, *blocks, head], loss_fn=loss, topology=layout, partition_method="uniform")
    parts = [int(part) for part in model.parts]
    described = {"num_layers": parts[-1], "partition_method": "uniform", "tied": {"embed": [0, parts[-1] - 1]}}
    return model, {"pipeline_layout": {**described, "parts": parts}}


class Gated(torch.nn.Module):
    """An expert as AutoEP looks for it."""

    def __init__(self, hidden, inner):
        super().__init__()
        self.w1, self.w3 = (torch.nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(inner, hidden, bias=False)


class Block(torch.nn.Module):
    """A mixture of experts as AutoEP looks for it; its own layer takes the place of this one."""

    def __init__(self, hidden, inner, experts):
        super().__init__()
        self.gate = torch.nn.Linear(hidden, experts, bias=False)
        self.experts = torch.nn.ModuleList(Gated(hidden, inner) for _ in range(experts))

    def forward(self, hidden):
        raise NotImplementedError("AutoEP replaces this layer")


class AutoEpModel(torch.nn.Module):
    """A model without parallelism of its own, for AutoEP to cut."""

    def __init__(self, config):
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(config.vocabulary, config.hidden)
        self.block0 = Block(config.hidden, config.ffn, 4)
        self.norm = torch.nn.LayerNorm(config.hidden)
        self.block1 = Block(config.hidden, config.ffn, 4)

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.block0(hidden))
        hidden = hidden + self.block1(hidden)
        return torch.nn.functional.cross_entropy(hidden.flatten(0, 1).float(), labels.flatten() % hidden.shape[-1])


class AutoEpCutModel(AutoEpModel):
    """With a layer by columns and one by rows, for AutoTP to cut."""

    def __init__(self, config):
        super().__init__(config)
        self.up = torch.nn.Linear(config.hidden, config.ffn)
        self.down = torch.nn.Linear(config.ffn, config.hidden)

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.nn.functional.silu(self.up(hidden)))
        hidden = self.norm(hidden + self.block0(hidden))
        hidden = hidden + self.block1(hidden)
        return torch.nn.functional.cross_entropy(hidden.flatten(0, 1).float(), labels.flatten() % hidden.shape[-1])


AUTOEP = {
    "enabled": True,
    "moe_layer_pattern": r"block\d",
    "router_pattern": "gate",
    "expert_pattern": "experts",
    "expert_w1": "w1",
    "expert_w2": "w2",
    "expert_w3": "w3",
    "top_k": 2,
    "score_func": "softmax",
    "use_grouped_mm": False,
}
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}

CONFIGURED = {
    "fused": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "muon": {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.95, "weight_decay": 0.1}},
}
"""Optimizers of DeepSpeed's own, named in its configuration."""


AUTOEP_MODELS = {"autoep": AutoEpModel, "autoep-cut": AutoEpCutModel}


class CutModel(torch.nn.Module):
    """Model for AutoTP to cut: one layer by columns, one by rows, unevenly where the width is odd."""

    def __init__(self, config, inner):
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(config.vocabulary, config.hidden)
        self.up = torch.nn.Linear(config.hidden, inner)
        self.down = torch.nn.Linear(inner, config.hidden)
        self.norm = torch.nn.LayerNorm(config.hidden)

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.down(torch.nn.functional.silu(self.up(hidden))))
        return torch.nn.functional.cross_entropy(hidden.flatten(0, 1).float(), labels.flatten() % hidden.shape[-1])


AUTOTP = {
    "layer_specs": [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ],
    "use_default_specs": False,
}


class Lion(torch.optim.Optimizer):
    """One moment and no step (Chen et al. 2023)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (item for item in group["params"] if item.grad is not None):
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                first, second = group["betas"]
                update = (first * moment + (1 - first) * parameter.grad).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                moment.mul_(second).add_((1 - second) * parameter.grad)


class Accumulating(torch.optim.Optimizer):
    """A sum of squares, a step that is an int, and one in the group: as Adagrad and DeepSpeed's fused optimizers do."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "step": 0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for parameter in (item for item in group["params"] if item.grad is not None):
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                total = state.setdefault("sum", torch.zeros_like(parameter))
                total.add_(parameter.grad**2)
                scale = group["lr"] / (1 + 0.1 * group["step"] + 0.1 * state["steps"])
                parameter.sub_(scale * parameter.grad / (total.sqrt() + 1e-8))


def batch(config, step, sample):
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (GLOBAL_BATCH, config.sequence + 1)
    tokens = torch.randint(0, config.vocabulary, shape, generator=generator)[sample : sample + 1]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def config_of(run, topology):
    cut = {"tensor_parallel": {"autotp_size": topology.tp, "partition_config": AUTOTP}}
    auto = {"expert_parallel": {**AUTOEP, "autoep_size": topology.ep}, "optimizer": ADAM}
    return {
        **(auto if run["model"] in AUTOEP_MODELS else {}),
        **(cut if run["model"] in {"cut", "autoep-cut"} and topology.tp > 1 else {"train_batch_size": GLOBAL_BATCH}),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": GLOBAL_BATCH // topology.num_replicas,
        "zero_optimization": {"stage": topology.zero, **run.get("zero", {})},
        "bf16": {"enabled": bool(run.get("bf16"))},
        "data_types": run.get("data_types", {}),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4}},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if run.get("fp16") else {}),
        **({"optimizer": CONFIGURED[run["configured"]]} if run.get("configured") else {}),
    }


def optimizer_of(run, groups):
    if run.get("optimizer") == "lion":
        return Lion(groups, lr=1e-3)
    if run.get("optimizer") == "accumulating":
        return Accumulating(groups)
    if run.get("optimizer") == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def flat_model(run, config, topology):
    if run["model"] in AUTOEP_MODELS:
        return AUTOEP_MODELS[run["model"]](config)
    if run["model"] == "cut":
        return CutModel(config, run["inner"])
    return MoeModel(config, topology) if run["model"] == "moe" else FlatModel(config, gain="single" in run)


def groups_of(run, model):
    groups = parameter_groups(model, weight_decay=0.1)
    if run["model"] in {"moe", "moe-pipeline"}:
        named = [{**group, "name": f"dense-{at}"} for at, group in enumerate(groups)]
        return split_params_into_different_moe_groups_for_optimizer(named)
    if run.get("single"):  # a group of one parameter of one element
        single = model.get_parameter(run["single"])
        for group in groups:
            group["params"] = [item for item in group["params"] if item is not single]
        groups.insert(1, {"params": [single], "weight_decay": 0.0})
    return groups


@functools.cache
def sequence_mpu(cp):
    sequences.initialize_sequence_parallel(cp)
    return sequences


def make_partial(model, info, topology):
    """Let every tensor-parallel rank begin with norms of its own, and declare them: nothing makes them equal again."""
    info["parameter_to_average_patterns"] = info["tp_replicated_parameter_patterns"]
    info["tp_replicated_parameter_patterns"] = []
    rank = topology.coordinate(int(os.environ["RANK"])).tp
    for name, parameter in model.named_parameters():
        if name.endswith("attention_norm"):
            parameter.data += 0.05 * rank


def make_engine(run, config, topology):
    if run["model"] == "moe-pipeline":
        model, client = make_moe_pipeline(config, topology)
    elif run["model"] == "pipeline":
        model = build(config, topology)
        info = {**universal_checkpoint_info(config), "original_vocab_size": config.vocabulary}
        if run.get("partial"):
            make_partial(model, info, topology)
        client = {"universal_checkpoint_info": info, "pipeline_layout": pipeline_description(config, model)["pipeline"]}
    else:
        model, client = (
            flat_model(run, config, topology),
            {"note": {"a": (1, 2.5, None)}, "generator": torch.arange(7, dtype=torch.uint8)},
        )
    for name in run.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    if run.get("weights"):  # what a warm start must be equal to: weights before the engine is made
        model.load_state_dict(torch.load(run["weights"], weights_only=True))
    if run.get("configured"):
        optimized = {"model_parameters": [item for item in model.parameters() if item.requires_grad]}
    else:
        optimized = {"optimizer": None if run["model"] in AUTOEP_MODELS else optimizer_of(run, groups_of(run, model))}
    if topology.cp > 1:
        optimized["mpu"] = sequence_mpu(topology.cp)
    engine, *_ = deepspeed.initialize(model=model, config=config_of(run, topology), **optimized)
    return engine, client


def pipeline_step(engine, config, topology, rank):
    replica = topology.coordinate(rank).dp
    micro = GLOBAL_BATCH // topology.dp
    batches = (batch(config, engine.global_steps, replica * micro + at) for at in range(micro))
    return float(engine.train_batch(data_iter=batches))


def flat_step(engine, config, topology, rank):
    replica, part = topology.replica(rank), topology.coordinate(rank).dp % topology.cp
    micro = GLOBAL_BATCH // topology.num_replicas
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for at in range(micro):
        sample = batch(config, engine.global_steps, replica * micro + at)
        loss = engine(*(tokens.chunk(topology.cp, dim=1)[part].to(engine.device) for tokens in sample))
        engine.backward(loss / topology.cp if topology.zero < 3 else loss)  # DeepSpeed sums over cp, but in ZeRO-3
        engine.step()
        total += loss.detach().double() / micro
    torch.distributed.all_reduce(total)
    return float(total) / topology.world_size


def whole_states(engine):
    """Name -> what DeepSpeed itself says each state of a parameter (but for tensor parallelism whole) is."""
    optimizer = engine.optimizer
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    states = ("exp_avg", "exp_avg_sq")
    if engine.zero_optimization_stage() == 0:
        inner = getattr(optimizer, "optimizer", optimizer)
        groups = getattr(optimizer, "fp16_groups", [group["params"] for group in inner.param_groups])
        masters = getattr(optimizer, "fp32_groups", groups)
        for group, own in zip(groups, masters, strict=True):
            for parameter, master in zip(group, own, strict=True):
                fp32 = {} if master is parameter else {"fp32": master}
                yield names[parameter], fp32 | {state: inner.state[master][state] for state in states}
        return
    if engine.zero_optimization_stage() < 3:  # linked once, before the optimizer's first step filled its state
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, name in names.items():
        fp32 = {"fp32": safe_get_full_fp32_param(parameter)}
        yield name, fp32 | {state: safe_get_full_optimizer_state(parameter, state) for state in states}


def write_truth(engine, path, place):
    """SHA-256 of each of this stage's whole tensors by name."""
    found = {}
    for name, tensors in whole_states(engine):
        for state, tensor in tensors.items():
            content = tensor.detach().float().contiguous().cpu().numpy().tobytes()
            found[f"{state}/{name}"] = f"{tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
    if place.dp == 0:
        path.with_name(f"truth-pp{place.pp}-tp{place.tp}.json").write_text(json.dumps(found, indent=1) + "\n")


def check_client(state, client):
    """Check that the client state is unchanged."""
    for key, value in client.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[key], value), key
        elif key != "pipeline_layout":
            assert state[key] == value, (key, state[key], value)
    if "pipeline_layout" in client:
        assert list(state["pipeline_layout"]["parts"]) == client["pipeline_layout"]["parts"]


def main():
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed(dist_backend=os.environ.get("RANK_BACKEND", "gloo"), verbose=False)
    engines = {}
    for run in task["runs"]:
        topology = Topology.parse(run["topology"])
        config = SIZES[run.get("size", "small")]
        step_once = pipeline_step if run["model"] in PIPELINES else flat_step
        key = json.dumps([run.get(name) for name in OPTIONS])
        if key not in engines:
            engines.clear()
            engines[key] = make_engine(run, config, topology)
        engine, client = engines[key]
        if run.get("load"):
            folder = Path(run["load"])
            tag = None if run.get("untagged") else folder.name
            strict = not run.get("without_frozen")
            path, state = engine.load_checkpoint(
                str(folder.parent),
                tag=tag,
                load_module_strict=strict,
                load_module_only=bool(run.get("module_only")),
                load_lr_scheduler_states=not run.get("without_schedule"),
            )
            assert path is not None, folder
            if not run.get("foreign"):  # a source of another framework has no client state
                check_client(state, client)
            if run.get("spoil"):  # a control: what a lost first moment, or another state, would look like
                name = "exp_avg" if run["spoil"] is True else run["spoil"]
                for group_state in engine.optimizer.optimizer.state.values():
                    if name in group_state:
                        group_state[name].zero_()
        losses = []
        for _ in range(run["steps"]):
            losses.append(step_once(engine, config, topology, rank))
            if run.get("save") and engine.global_steps == run["save_at"]:
                folder = Path(run["save"])
                options = {"exclude_frozen_parameters": True} if run.get("without_frozen") else {}
                engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=dict(client), **options)
                if run.get("truth"):
                    write_truth(engine, Path(run["truth"]), topology.coordinate(rank))
        if rank == 0:
            with open(task["results"], "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": run["name"], "losses": losses}) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
