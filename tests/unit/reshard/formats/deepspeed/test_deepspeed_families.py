"""Known families of models: what fits them, what is refused, and that the tables are sound."""

import dataclasses
import itertools
import re

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.families import choose
from reshard.formats.deepspeed.families.choose import Model, Split, split_by_family
from reshard.formats.deepspeed.families.fit import fit_family
from reshard.formats.deepspeed.families.shapes import MisfitError, parse_size
from reshard.formats.deepspeed.families.tables import FAMILIES
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.tensor_parallel import patterns
from reshard.formats.deepspeed.tensor_parallel.rules import WHOLE

SIZES = {
    "vocabulary": 64, "hidden": 32, "query": 32, "key": 16, "head": 8, "inner": 48, "experts": 4, "positions": 24,
}  # fmt: skip
TITLES = [family.title for family in FAMILIES]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def shapes_of(title: str, *, without: tuple[str, ...] = (), layers: int = 2) -> dict[str, tuple[int, ...]]:
    """Every parameter of a family, with all optional ones that can stand together."""
    family = next(family for family in FAMILIES if family.title == title)
    first = 3 if family.first_layer is None else 0
    shapes = {}
    for entry in family.entries:
        if entry.group in without:
            continue
        for layer in range(first, first + layers):
            words = {"layer": layer, "embedding": first - 1, "norm": first + layers, "head": first + layers + 1}
            name = re.sub(r"\{([a-z]+)\}", lambda match, words=words: str(words[match[1]]), entry.name)
            shapes[name] = tuple(
                sum(SIZES[key] * factor for key, factor in parse_size(size).items()) for size in entry.shape
            )
    return shapes


def split(shapes, tp=2, *, info=None, config=None, aliases=None, version=None) -> Split | list[str]:
    params = {name: Param(name=name, shape=shape, rule=WHOLE) for name, shape in shapes.items()}
    file = {"ds_config": config, "checkpoint_version": version}
    model = Model(params=params, weights={}, aliases=aliases or {}, patterns=patterns.parse(info), file=file)
    return split_by_family(model, tp)


def kinds(result) -> dict[str, tuple]:
    assert isinstance(result, Split), result
    return {name: (param.rule.dim, param.rule.num_parts) for name, param in result.params.items()}


def layers_of(name: str) -> int:
    return 2 if "{layer}" in name else 1


@pytest.mark.parametrize("title", TITLES)
def test_every_family_fits_itself_and_every_misfit_is_named(title):
    family = next(family for family in FAMILIES if family.title == title)
    shapes = shapes_of(title, without=("tied embedding",) if family.one_of else ())
    entries = fit_family(family, shapes, {}).entries
    assert entries.keys() == shapes.keys()
    with pytest.raises(MisfitError, match=r"scale is none of its parameters"):
        fit_family(family, {**shapes, "model.layers.0.scale": (32,)}, {})
    for name in shapes:
        entry = entries[name]
        rest = {key: shape for key, shape in shapes.items() if key != name}
        members = [key for key in shapes if entries[key].group == entry.group]
        if not entry.group or len(members) > 1 or name == family.head[0]:
            with pytest.raises(MisfitError):
                fit_family(family, rest, {})
        for dim in range(len(shapes[name])):
            own = shapes[name]
            wrong = (*own[:dim], own[dim] + 1, *own[dim + 1 :])
            sizes = entry.shape[dim]
            lonely = sum(sizes in other.shape for other in family.entries) == 1
            if not (lonely and layers_of(entry.name) == 1):
                with pytest.raises(MisfitError, match=r"has the shape|multiple"):
                    fit_family(family, {**shapes, name: wrong}, {})


@pytest.mark.parametrize("title", TITLES)
def test_names_of_a_family_never_match_two_entries(title):
    family = next(family for family in FAMILIES if family.title == title)
    for entry, other in itertools.permutations(family.entries, 2):
        assert entry.name != other.name


def test_llama_is_split_as_autotp_splits_it():
    result = split(shapes_of("Hugging Face Llama"))
    found = kinds(result)
    assert {found[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"} == {(0, 1)}
    assert {found[f"model.layers.1.mlp.{name}_proj.bias"] for name in ("gate", "up")} == {(0, 1)}
    assert found["model.layers.1.self_attn.o_proj.weight"][0] == found["model.layers.0.mlp.down_proj.weight"][0] == 1
    for name in ("model.layers.0.self_attn.o_proj.bias", "model.norm.weight", EMBEDDING):
        assert found[name][0] is None
    assert found[HEAD] == (0, 1)
    assert "Hugging Face Llama" in result.note
    assert "--patterns overrides" in result.note
    assert "tp must divide that of keys and values" in result.note


def test_tied_head_is_split_with_the_embedding_and_a_head_that_is_lost_is_named():
    shapes = shapes_of("Hugging Face Mistral", without=("head",))
    assert kinds(split(shapes, aliases={HEAD: EMBEDDING}))[EMBEDDING] == (0, 1)
    assert split(shapes) == ["it is not Hugging Face Mistral: lm_head.weight is missing"]


def test_preset_of_ds_config_keeps_the_head_whole():
    shapes = shapes_of("Hugging Face Llama")
    found = split(shapes, config={"tensor_parallel": {"autotp_size": 1, "preset_model": "llama"}})
    assert kinds(found)[HEAD][0] is None
    assert kinds(split(shapes, config={"tensor_parallel": {"autotp_size": 1}}))[HEAD] == (0, 1)
    assert split(shapes, config={"tensor_parallel": {"preset_model": "bloom"}}) == []


def test_splits_of_ds_config_itself_are_no_familys():
    config = {"tensor_parallel": {"autotp_size": 1, "partition_config": {"layer_specs": []}}}
    assert split(shapes_of("Hugging Face Llama"), config=config) == [
        "ds_config has tensor_parallel settings of its own for the splits, which no known family has"
    ]


def test_number_of_heads_is_checked_where_shapes_tell_it():
    shapes = shapes_of("Hugging Face Qwen3")
    assert isinstance(split(shapes, 2), Split)
    with pytest.raises(UnsupportedError, match="Qwen3 with 2 heads of keys and values"):
        split(shapes, 4)


@pytest.mark.parametrize("title", ["Hugging Face Phi-3", "Hugging Face GPT-2", "Hugging Face BLOOM"])
def test_family_that_deepspeed_does_not_train_is_refused_with_its_reason(title):
    with pytest.raises(UnsupportedError, match=rf"{title}: .*DeepSpeed 0\.19\.8 does not"):
        split(shapes_of(title))


@pytest.mark.parametrize("title", ["Hugging Face Mixtral", "Hugging Face Phi-MoE"])
def test_models_with_fused_experts_need_the_preset_and_say_so(title):
    found = split(shapes_of(title))
    assert kinds(found)["model.layers.0.mlp.experts.gate_up_proj"][0] is kinds(found)[HEAD][0] is None
    assert kinds(found)["model.layers.0.self_attn.q_proj.weight"] == (0, 1)
    assert "preset_model: mixtral" in found.note


def test_model_of_no_family_is_told_what_is_closest():
    shapes = shapes_of("Hugging Face Qwen2")
    shapes["model.layers.1.self_attn.rotary.scale"] = (8,)
    assert split(shapes) == [
        "it is not Hugging Face Qwen2: model.layers.1.self_attn.rotary.scale is none of its parameters"
    ]
    assert split({"up.weight": (4, 4)}) == []
    shapes = shapes_of("Hugging Face Llama", layers=3)
    shapes = {name: shape for name, shape in shapes.items() if ".layers.1." not in name}
    assert "layers have the numbers [0, 2]" in split(shapes)[0]


def test_numbers_of_layers_in_a_hostile_file_take_no_memory_and_no_time():
    shapes = shapes_of("Hugging Face Llama")
    far = {name.replace(".layers.1.", ".layers.999999999."): shape for name, shape in shapes.items()}
    assert "layers have the numbers [0, 999999999]" in split(far)[0]
    longer = {name.replace(".layers.1.", f".layers.{'9' * 5000}."): shape for name, shape in shapes.items()}
    assert "is none of its parameters" in split(longer)[0]


MEGATRON_INFO = {
    "universal_checkpoint_version": 0.2,
    "vocabulary_parameter_patterns": ["tied_modules.embed.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [
        "tied_modules.embed.position_embeddings.weight", r"\d+.input_layernorm.weight", r"\d+.input_layernorm.bias",
        r"\d+.post_attention_layernorm.weight", r"\d+.post_attention_layernorm.bias", r"\d+.self_attention.dense.bias",
        r"\d+.mlp.dense_4h_to_h.bias", r"\d+.weight", r"\d+.bias",
    ],
    "parameter_with_row_parallelism_patterns": [],
    "original_vocab_size": 61,
    "padded_vocab_size": 64,
}  # fmt: skip


def test_megatron_pipeline_gets_the_row_patterns_that_it_leaves_out_at_tp_1():
    shapes = shapes_of("Megatron-DeepSpeed with a pipeline", without=("separate head", "embedding norm"))
    result = split(shapes, info=MEGATRON_INFO)
    found = kinds(result)
    assert found["3.self_attention.dense.weight"][0] == found["4.mlp.dense_4h_to_h.weight"][0] == 1
    assert found["3.self_attention.query_key_value.weight"] == found["3.mlp.dense_h_to_4h.bias"] == (0, 1)
    assert found["4.mlp.dense_4h_to_h.bias"][0] is found["5.weight"][0] is None
    embedding = result.params["tied_modules.embed.word_embeddings.weight"]
    assert (embedding.rule.dim, embedding.rule.vocabulary, embedding.rows) == (0, True, 61)
    gated = shapes_of("Megatron-DeepSpeed with a pipeline and SwiGLU", without=("tied embedding", "positions"))
    assert kinds(split(gated))["3.mlp.dense_h_to_4h.weight"] == (0, 2)


def test_megatrons_older_order_of_heads_is_refused():
    shapes = shapes_of("Megatron-DeepSpeed without a pipeline")
    assert isinstance(split(shapes, version=3.0), Split)
    with pytest.raises(UnsupportedError, match=r"checkpoint_version 1.0: heads are fused otherwise"):
        split(shapes, version=1.0)


def test_splits_that_the_source_states_must_be_the_familys():
    shapes = shapes_of("Megatron-DeepSpeed with a pipeline", without=("separate head",))
    info = {**MEGATRON_INFO, "tp_replicated_parameter_patterns": [r"\d+.self_attention.query_key_value.weight"]}
    with pytest.raises(UnsupportedError, match=r"3.self_attention.query_key_value.weight: universal_checkpoint_info"):
        split(shapes, info=info)


def test_families_that_fit_and_differ_are_refused(monkeypatch):
    llama = next(family for family in FAMILIES if family.title == "Hugging Face Llama")
    entries = tuple(dataclasses.replace(entry, tied_kind="") for entry in llama.entries)
    other = dataclasses.replace(llama, title="Another", entries=entries)
    monkeypatch.setattr(choose, "FAMILIES", (llama, other))
    shapes = shapes_of("Hugging Face Llama", without=("head",))
    with pytest.raises(UnsupportedError, match="Hugging Face Llama or Another, which are split in different ways"):
        split(shapes, aliases={HEAD: EMBEDDING})
