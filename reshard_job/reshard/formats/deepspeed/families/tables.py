"""The known families, as data.

Hugging Face's models are split as DeepSpeed 0.19.8's AutoTP splits them with transformers 5.24: by the plan that
transformers ships with a model (`base_model_tp_plan`), or by the preset that `tensor_parallel.preset_model` names.
Found by real runs at tp=2. Megatron-DeepSpeed's names and splits are those that its models state in
`universal_checkpoint_info` and of its parallel layers; they were not compared with a run of its code.
"""

from __future__ import annotations

import dataclasses

COLUMN, ROW, WHOLE = "shard-v", "shard-h", "replicate"
"""Kinds of splits, as in pattern files: along dim 0, along dim 1, not at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One parameter, or one of each layer.

    Attributes:
        name: `{layer}` stands for each number of a layer, other words in braces for a number that occurs once.
        kind: how it is split.
        shape: named sizes, `[ndim]`; a sum such as `2inner` or `query + 2key` with at most one size that earlier
            entries do not have.
        group: entries of one group are all there, or none of them; empty for parameters that must be there.
        parts: tensors of equal size that are fused along dim 0, each of which is split.
        tied_kind: how it is split if the output head is the same tensor; empty for the same as `kind`.
    """

    name: str
    kind: str
    shape: tuple[str, ...]
    group: str = ""
    parts: int = 1
    tied_kind: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        title: in messages.
        entries: its parameters.
        presets: values of `tensor_parallel.preset_model` with which it is split so; empty string for none.
        head: name of the output head and of the parameter that it may be tied to; empty if it has no head of its own.
        one_of: groups of which exactly one must be there; empty for no such choice.
        first_layer: number of the first layer, or None for any.
        version: least `checkpoint_version` in the client state, if there is one: earlier ones fuse heads otherwise.
        advice: what the run that loads the result must set, for a note; may be empty.
        refused: why DeepSpeed does not train it with tensor parallelism; empty if it does.
    """

    title: str
    entries: tuple[Entry, ...]
    presets: tuple[str, ...] = ("",)
    head: tuple[str, str] = ("", "")
    one_of: tuple[str, ...] = ()
    first_layer: int | None = 0
    version: float = 0
    advice: str = ""
    refused: str = ""


_L = "model.layers.{layer}."
_HEAD = ("lm_head.weight", "model.embed_tokens.weight")


def _decoder(*layer: Entry, vocabulary: str = WHOLE, tied: str = "", head: str = COLUMN) -> tuple[Entry, ...]:
    """Return the entries of a decoder of Hugging Face's with the given entries of a layer."""
    return (
        Entry("model.embed_tokens.weight", vocabulary, ("vocabulary", "hidden"), tied_kind=tied),
        *layer,
        Entry(_L + "input_layernorm.weight", WHOLE, ("hidden",)),
        Entry(_L + "post_attention_layernorm.weight", WHOLE, ("hidden",)),
        Entry("model.norm.weight", WHOLE, ("hidden",)),
        Entry("lm_head.weight", head, ("vocabulary", "hidden"), group="head"),
    )


def _attention(*, bias: str = "", output_bias: str = "", output: str = "o_proj") -> tuple[Entry, ...]:
    """Return the entries of attention with separate projections; `bias` and `output_bias` are groups of biases."""
    name = _L + "self_attn."
    sizes = {"q_proj": "query", "k_proj": "key", "v_proj": "key"}
    own = [Entry(f"{name}{part}.weight", COLUMN, (size, "hidden")) for part, size in sizes.items()]
    own.append(Entry(f"{name}{output}.weight", ROW, ("hidden", "query")))
    if bias:
        group = "" if bias == "always" else bias
        own += [Entry(f"{name}{part}.bias", COLUMN, (size,), group) for part, size in sizes.items()]
    if output_bias:
        group = "" if output_bias == "always" else output_bias
        own.append(Entry(f"{name}{output}.bias", WHOLE, ("hidden",), group))
    return tuple(own)


def _gated(*, bias: str = "") -> tuple[Entry, ...]:
    """Return the entries of a gated feed-forward network; `bias` is the group of its biases."""
    name = _L + "mlp."
    weights = (
        Entry(name + "gate_proj.weight", COLUMN, ("inner", "hidden")),
        Entry(name + "up_proj.weight", COLUMN, ("inner", "hidden")),
        Entry(name + "down_proj.weight", ROW, ("hidden", "inner")),
    )
    biases = (
        Entry(name + "gate_proj.bias", COLUMN, ("inner",), bias),
        Entry(name + "up_proj.bias", COLUMN, ("inner",), bias),
        Entry(name + "down_proj.bias", WHOLE, ("hidden",), bias),
    )
    return weights + (biases if bias else ())


_LLAMA = (*_attention(bias="attention biases", output_bias="attention biases"), *_gated(bias="feed-forward biases"))
_MISTRAL = (*_attention(), *_gated())
_QWEN2 = (*_attention(bias="always"), *_gated())
_QWEN3 = (
    *_attention(bias="attention biases", output_bias="attention biases"),
    Entry(_L + "self_attn.q_norm.weight", WHOLE, ("head",)),
    Entry(_L + "self_attn.k_norm.weight", WHOLE, ("head",)),
    *_gated(),
)
_PHI = (
    *_attention(bias="always", output_bias="always", output="dense"),
    Entry(_L + "mlp.fc1.weight", COLUMN, ("inner", "hidden")),
    Entry(_L + "mlp.fc1.bias", COLUMN, ("inner",)),
    Entry(_L + "mlp.fc2.weight", ROW, ("hidden", "inner")),
    Entry(_L + "mlp.fc2.bias", WHOLE, ("hidden",)),
)
_PHI3 = (
    Entry(_L + "self_attn.o_proj.weight", ROW, ("hidden", "query")),
    Entry(_L + "self_attn.qkv_proj.weight", COLUMN, ("query + 2key", "hidden")),
    Entry(_L + "mlp.down_proj.weight", ROW, ("hidden", "inner")),
    Entry(_L + "mlp.gate_up_proj.weight", COLUMN, ("2inner", "hidden"), parts=2),
)
_MIXTRAL = (
    *_attention(),
    Entry(_L + "mlp.gate.weight", WHOLE, ("experts", "hidden")),
    Entry(_L + "mlp.experts.gate_up_proj", WHOLE, ("experts", "2inner", "hidden")),
    Entry(_L + "mlp.experts.down_proj", WHOLE, ("experts", "hidden", "inner")),
)
_PHIMOE = (
    Entry("model.embed_tokens.weight", WHOLE, ("vocabulary", "hidden")),
    *_attention(bias="attention biases", output_bias="attention biases"),
    Entry(_L + "mlp.router.weight", WHOLE, ("experts", "hidden")),
    Entry(_L + "mlp.experts.gate_up_proj", WHOLE, ("experts", "2inner", "hidden")),
    Entry(_L + "mlp.experts.down_proj", WHOLE, ("experts", "hidden", "inner")),
    *(
        Entry(f"{name}.{part}", WHOLE, ("hidden",))
        for name in (_L + "input_layernorm", _L + "post_attention_layernorm", "model.norm")
        for part in ("weight", "bias")
    ),
    Entry("lm_head.weight", WHOLE, ("vocabulary", "hidden"), group="head"),
    Entry("lm_head.bias", WHOLE, ("vocabulary",), group="head bias"),
)


def _megatron_layer(name: str, *, parts: int) -> tuple[Entry, ...]:
    """Return the entries of a layer of Megatron-DeepSpeed; `parts` is 2 for a gated feed-forward network (SwiGLU)."""
    inner = "inner" if parts == 1 else "2inner"
    norms = [
        Entry(f"{name}{norm}.{part}", WHOLE, ("hidden",), "" if part == "weight" else "norm biases")
        for norm in ("input_layernorm", "post_attention_layernorm")
        for part in ("weight", "bias")
    ]
    return (
        *norms,
        Entry(name + "self_attention.dense.weight", ROW, ("hidden", "query")),
        Entry(name + "self_attention.dense.bias", WHOLE, ("hidden",), "biases"),
        # the heads of one group follow each other: its queries, its key, its value
        Entry(name + "self_attention.query_key_value.weight", COLUMN, ("query + 2key", "hidden")),
        Entry(name + "self_attention.query_key_value.bias", COLUMN, ("query + 2key",), "biases"),
        Entry(name + "mlp.dense_4h_to_h.weight", ROW, ("hidden", "inner")),
        Entry(name + "mlp.dense_4h_to_h.bias", WHOLE, ("hidden",), "biases"),
        Entry(name + "mlp.dense_h_to_4h.weight", COLUMN, (inner, "hidden"), parts=parts),
        Entry(name + "mlp.dense_h_to_4h.bias", COLUMN, (inner,), "biases", parts=parts),
    )


def _megatron(*, parts: int) -> tuple[Entry, ...]:
    """Return the entries of a model of Megatron-DeepSpeed without a pipeline."""
    root = "language_model."
    return (
        Entry(root + "embedding.word_embeddings.weight", COLUMN, ("vocabulary", "hidden")),
        Entry(root + "embedding.word_embeddings.norm.weight", WHOLE, ("hidden",), "embedding norm"),
        Entry(root + "embedding.word_embeddings.norm.bias", WHOLE, ("hidden",), "embedding norm"),
        Entry(root + "embedding.position_embeddings.weight", WHOLE, ("positions", "hidden"), "positions"),
        *_megatron_layer(root + "encoder.layers.{layer}.", parts=parts),
        Entry(root + "encoder.final_layernorm.weight", WHOLE, ("hidden",)),
        Entry(root + "encoder.final_layernorm.bias", WHOLE, ("hidden",), "norm biases"),
        Entry(root + "output_layer.weight", COLUMN, ("vocabulary", "hidden"), "head"),
    )


def _megatron_pipeline(*, parts: int) -> tuple[Entry, ...]:
    """Return the entries of a model of Megatron-DeepSpeed with a PipelineModule, tied (GPT, BLOOM) or not (Llama)."""
    tied = "tied_modules.embed."
    return (
        Entry(tied + "word_embeddings.weight", COLUMN, ("vocabulary", "hidden"), "tied embedding"),
        Entry(tied + "word_embeddings.norm.weight", WHOLE, ("hidden",), "embedding norm"),
        Entry(tied + "word_embeddings.norm.bias", WHOLE, ("hidden",), "embedding norm"),
        Entry(tied + "position_embeddings.weight", WHOLE, ("positions", "hidden"), "positions"),
        Entry("{embedding}.word_embeddings.weight", COLUMN, ("vocabulary", "hidden"), "separate head"),
        *_megatron_layer("{layer}.", parts=parts),
        Entry("{norm}.weight", WHOLE, ("hidden",)),
        Entry("{norm}.bias", WHOLE, ("hidden",), "norm biases"),
        Entry("{head}.lm_head.weight", COLUMN, ("vocabulary", "hidden"), "separate head"),
    )


def _linear(name: str, rows: str, columns: str, bias: str) -> tuple[Entry, ...]:
    """Return the entries of a layer of a family that is not split; `bias` is the size of its bias."""
    return Entry(name + ".weight", WHOLE, (rows, columns)), Entry(name + ".bias", WHOLE, (bias,))


def _norms(*names: str) -> tuple[Entry, ...]:
    return tuple(Entry(f"{name}.{part}", WHOLE, ("hidden",)) for name in names for part in ("weight", "bias"))


_H = "transformer.h.{layer}."
_GPT2 = (
    Entry("transformer.wte.weight", WHOLE, ("vocabulary", "hidden")),
    Entry("transformer.wpe.weight", WHOLE, ("positions", "hidden")),
    *_norms(_H + "ln_1", _H + "ln_2", "transformer.ln_f"),
    *_linear(_H + "attn.c_attn", "hidden", "3hidden", "3hidden"),
    *_linear(_H + "attn.c_proj", "hidden", "hidden", "hidden"),
    *_linear(_H + "mlp.c_fc", "hidden", "inner", "inner"),
    *_linear(_H + "mlp.c_proj", "inner", "hidden", "hidden"),
)
_BLOOM = (
    Entry("transformer.word_embeddings.weight", WHOLE, ("vocabulary", "hidden")),
    *_norms("transformer.word_embeddings_layernorm", "transformer.ln_f"),
    *_norms(_H + "input_layernorm", _H + "post_attention_layernorm"),
    *_linear(_H + "self_attention.query_key_value", "3hidden", "hidden", "3hidden"),
    *_linear(_H + "self_attention.dense", "hidden", "hidden", "hidden"),
    *_linear(_H + "mlp.dense_h_to_4h", "4hidden", "hidden", "4hidden"),
    *_linear(_H + "mlp.dense_4h_to_h", "hidden", "4hidden", "hidden"),
)

_EMBEDDINGS = ("tied embedding", "separate head")
_WHOLE_EXPERTS = "experts and the output head stay whole: resume with tensor_parallel.preset_model: mixtral"
_UNSPLIT_HEAD = "the output head stays whole, as with the preset that ds_config names"

FAMILIES: tuple[Family, ...] = (
    Family(title="Hugging Face Llama", entries=_decoder(*_LLAMA, tied=COLUMN), head=_HEAD),
    Family(title="Hugging Face Mistral", entries=_decoder(*_MISTRAL, tied=COLUMN), head=_HEAD),
    Family(title="Hugging Face Qwen2", entries=_decoder(*_QWEN2, tied=COLUMN), head=_HEAD),
    Family(title="Hugging Face Qwen3", entries=_decoder(*_QWEN3, tied=COLUMN), head=_HEAD),
    Family(
        title="Hugging Face Llama or Mistral with AutoTP's preset",
        entries=_decoder(*_LLAMA, head=WHOLE), presets=("llama", "qwen2", "mixtral"), head=_HEAD, advice=_UNSPLIT_HEAD,
    ),
    Family(
        title="Hugging Face Qwen2 with AutoTP's preset",
        entries=_decoder(*_QWEN2, head=WHOLE), presets=("llama", "qwen2", "mixtral"), head=_HEAD, advice=_UNSPLIT_HEAD,
    ),
    Family(
        title="Hugging Face Phi",
        entries=(
            Entry("model.embed_tokens.weight", WHOLE, ("vocabulary", "hidden"), tied_kind=COLUMN),
            *_PHI,
            Entry(_L + "input_layernorm.weight", WHOLE, ("hidden",)),
            Entry(_L + "input_layernorm.bias", WHOLE, ("hidden",)),
            Entry("model.final_layernorm.weight", WHOLE, ("hidden",)),
            Entry("model.final_layernorm.bias", WHOLE, ("hidden",)),
            Entry("lm_head.weight", COLUMN, ("vocabulary", "hidden")),
            Entry("lm_head.bias", COLUMN, ("vocabulary",)),
        ),
    ),
    Family(
        title="Hugging Face Mixtral",
        entries=_decoder(*_MIXTRAL, head=WHOLE), presets=("", "mixtral", "llama", "qwen2"), head=_HEAD,
        advice=_WHOLE_EXPERTS + " (by transformers' plan, DeepSpeed 0.19.8 does not split Mixtral)",
    ),
    Family(
        title="Hugging Face Phi-MoE",
        entries=_PHIMOE, presets=("", "mixtral", "llama", "qwen2"), head=_HEAD,
        advice=_WHOLE_EXPERTS + " (by transformers' plan, DeepSpeed 0.19.8 does not split Phi-MoE)",
    ),
    Family(
        title="Hugging Face Phi-3",
        entries=_decoder(*_PHI3), presets=("", "phi3", "llama"), head=_HEAD,
        refused="DeepSpeed 0.19.8 does not train it with tensor parallelism: AutoTP refuses transformers' plan, and"
        " with the preset phi3 the model cuts query, key and value at the sizes of the whole model",
    ),
    Family(
        title="Hugging Face GPT-2",
        entries=_GPT2,
        refused="DeepSpeed 0.19.8 does not train it with tensor parallelism: AutoTP does not support it",
    ),
    Family(
        title="Hugging Face BLOOM",
        entries=_BLOOM,
        presets=("", "bloom"),
        refused="DeepSpeed 0.19.8 does not train it with tensor parallelism: AutoTP splits the heads, and the model"
        " adds the position biases (ALiBi) of all heads to them, or those of a model with fewer heads. A training that"
        " binds DeepSpeed's build_bloom_alibi_tensor to the model needs a file of patterns (--patterns)",
    ),
    Family(
        title="Megatron-DeepSpeed without a pipeline",
        version=2, entries=_megatron(parts=1),
    ),
    Family(
        title="Megatron-DeepSpeed without a pipeline, with SwiGLU",
        version=2, entries=_megatron(parts=2),
    ),
    Family(
        title="Megatron-DeepSpeed with a pipeline",
        version=2, entries=_megatron_pipeline(parts=1), first_layer=None,
        one_of=_EMBEDDINGS,
    ),
    Family(
        title="Megatron-DeepSpeed with a pipeline and SwiGLU",
        version=2, entries=_megatron_pipeline(parts=2), first_layer=None,
        one_of=_EMBEDDINGS,
    ),
)  # fmt: skip
"""All families that are known."""
