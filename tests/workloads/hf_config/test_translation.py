"""Configuration files as Hugging Face writes them: parameters as published, and what is refused by name."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.workloads import ShapeError, WorkloadError, get_workload, workload_names
from fsdpbench.workloads.hf_config import MODEL_TYPES, translate

# Facts of the models' published configurations; counts are those of their published checkpoints.
SIZES = [name for name in workload_names() if get_workload(name).family == "decoder"]
PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "hf_configs.json").read_text())


def shape_of(name, **changes):
    found = translate({**PUBLISHED[name]["config"], **changes})
    return get_workload(found.family, found.values).shape


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name):
    found = translate(PUBLISHED[name]["config"])
    assert get_workload(found.family, found.values).parameters == PUBLISHED[name]["parameters"]


def test_every_model_type_has_a_published_model():
    assert {entry["config"]["model_type"] for entry in PUBLISHED.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize("size", [size for size in SIZES if "tiny" not in size])
def test_named_sizes_are_what_their_files_say(size):
    file = {"gemma3-27b": "gemma-3-27b-text"}.get(size, size)
    named = get_workload(size).shape
    from_file = shape_of(file)
    same_numbers = {"rope": "yarn:factor=32.0;original=4096.0;truncate=0.0"} if size == "gpt-oss-20b" else {}
    assert named | same_numbers == from_file


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma-3-27b-text", "SSSSSF"),
        ("gemma-2-9b", "SF"),
        ("gpt-oss-20b", "SF"),
        ("mistral-7b", "S"),
        ("mistral-nemo-12b", "F"),
        ("qwen2.5-7b", "F"),
        ("phi-3-mini-4k", "S"),
        ("llama-3-8b", "F"),
    ],
)
def test_which_layers_slide(name, layers):
    assert shape_of(name)["layer_pattern"] == layers


def test_qwens_slide_from_a_layer_on_where_it_is_switched_on():
    changes = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 20}
    shape = shape_of("qwen2.5-7b", **changes)
    assert (shape["window"], shape["layer_pattern"]) == (512, "F" * 20 + "S" * 8)


def test_layer_types_come_before_any_rule():
    kinds = ["full_attention", "sliding_attention", "sliding_attention"] * 14
    shape = shape_of("gemma-2-9b", layer_types=kinds)
    assert shape["layer_pattern"] == "FSS"


def test_some_layers_of_a_mixture_may_be_dense():
    shape = shape_of("qwen3-30b-a3b", num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3])
    assert shape["moe_pattern"] == "DMDDDM"  # repeated: DMDDDMDM


def test_rotary_positions_of_either_generation_of_files():
    old = shape_of("llama-3.1-405b")
    config = dict(PUBLISHED["llama-3.1-405b"]["config"])
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    found = translate({**config, "rope_parameters": {**scaling, "rope_theta": theta}})
    assert get_workload(found.family, found.values).shape == old
    assert old["rope"] == "llama3:factor=8.0"
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    gemma = shape_of("gemma-3-1b", rope_parameters=both)
    assert (gemma["rope"], gemma["rope_theta"], gemma["local_theta"]) == ("linear:factor=8.0", 2e6, 2e4)


def test_long_contexts_of_phi_3():
    factors = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.5] * 48}
    shape = shape_of("phi-3-mini-4k", rope_scaling=factors, max_position_embeddings=131072)
    kind, _, numbers = shape["rope"].partition(":")
    told = dict(part.split("=") for part in numbers.split(";"))
    assert kind == "longrope"
    assert (told["original"], told["long"]) == ("4096.0", "|".join(["2.5"] * 48))
    assert float(told["mscale"]) == pytest.approx(1.19024, rel=1e-4)  # sqrt(1 + ln 32 / ln 4096)
    with pytest.raises(ShapeError, match="need 48 numbers"):
        shape_of("phi-3-mini-4k", rope_scaling=factors | {"short_factor": [1.0]})


def test_the_default_length_is_no_longer_than_what_models_are_trained_at():
    assert shape_of("qwen3-8b")["max_seq"] == 4096
    assert shape_of("phi-2")["max_seq"] == 2048


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("llama-3-8b", {"model_type": "mamba"}, "'mamba': the package transformers"),
        ("llama-3-8b", {"model_type": "gemma3", "text_config": {}}, "the package transformers"),
        ("llama-3-8b", {"model_type": None}, "key model_type is missing"),
        ("llama-3-8b", {"hidden_act": "xielu"}, "key hidden_act is 'xielu'"),
        ("llama-3-8b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of type 'dynamic'"),
        ("llama-3-8b", {"rope_scaling": {"rope_type": "linear"}}, "lack the key factor"),
        (
            "llama-3-8b",
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "power": 3}},
            "power of the rotary",
        ),
        ("llama-3-8b", {"clip_qkv": 8.0}, "key clip_qkv is 8.0: this may change the model"),
        ("llama-3-8b", {"quantization_config": {"quant_method": "awq"}}, "key quantization_config"),
        ("llama-3-8b", {"quantization_config": {"quant_method": "gptq"}}, "--lora-base 4bit"),
        ("llama-3-8b", {"architectures": ["LlamaForSequenceClassification"]}, "without its language head"),
        ("mistral-7b", {"architectures": ["MistralModel"]}, "Remove the key to build the language model"),
        ("llama-3-8b", {"architectures": "LlamaForCausalLM"}, "it must be a list of names"),
        ("llama-3.2-1b", {"torchscript": True}, "key torchscript"),
        ("llama-3-8b", {"output_hidden_states": True}, "key output_hidden_states"),
        ("t5-large", {"is_encoder_decoder": False}, "key is_encoder_decoder is False"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "awq"}}, "key quantization_config"),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, "key swiglu_limit is 5.0"),
        ("llama-3-8b", {"num_hidden_layers": "32"}, "key num_hidden_layers is '32': it must be a whole"),
        ("llama-3-8b", {"num_hidden_layers": True}, "key num_hidden_layers"),
        ("llama-3-8b", {"rms_norm_eps": float("inf")}, "key rms_norm_eps"),
        ("llama-3-8b", {"num_attention_heads": 0}, "num_attention_heads"),
        ("llama-3-8b", {"tie_word_embeddings": "no"}, "key tie_word_embeddings is 'no'"),
        ("llama-3-8b", {"layer_types": ["full_attention"]}, "key layer_types"),
        (
            "gemma-2-9b",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 42},
            "key sliding_window",
        ),
        ("gemma-2-9b", {"use_bidirectional_attention": True}, "key use_bidirectional_attention"),
        ("phi-2", {"qk_layernorm": True}, "key qk_layernorm"),
        ("mixtral-8x7b", {"output_router_logits": True}, "key output_router_logits"),
        ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "key router_jitter_noise"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "key mlp_only_layers"),
        ("t5-large", {"num_decoder_layers": 6}, "key num_decoder_layers"),
        ("t5-large", {"feed_forward_proj": "gated-silu"}, "key feed_forward_proj"),
        ("t5-large", {"tie_encoder_decoder": True}, "key tie_encoder_decoder"),
        ("llama-3-8b", {"pruned_heads": {"0": [1]}}, "key pruned_heads"),
        ("llama-3-8b", {"num_nextn_predict_layers": 1}, "key num_nextn_predict_layers"),
        (
            "llama-3-8b",
            {"model_type": "deepseek_v3", "n_shared_experts": 1},
            "'deepseek_v3': the package transformers",
        ),
        ("qwen3-30b-a3b", {"num_local_experts": 3}, "key num_local_experts is 3"),
        ("qwen1.5-moe-a2.7b", {"attention_bias": True}, "key attention_bias"),
        ("phi-3-mini-4k", {"full_attn_mod": 2}, "key full_attn_mod"),
        ("gpt2", {"n_inner": 1000}, "key n_inner"),
        ("gpt2", {"attn_pdrop": 0.0}, "key embd_pdrop|key attn_pdrop"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "key scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_is_not_built_is_refused_by_name(name, changes, told, monkeypatch):
    """By our own families, where the library is not installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ShapeError, match=told):
        shape_of(name, **changes)


def test_what_is_off_or_of_other_uses_is_no_hindrance():
    plain = shape_of("llama-3-8b")
    extra = {
        "temperature": 0.6,
        "clip_qkv": None,
        "use_parallel": False,
        "_name_or_path": "x",
        "id2label": {"0": "a"},
        "pruned_heads": {},
    }
    assert shape_of("llama-3-8b", **extra) == plain


def test_shared_experts_of_qwen2_moe():
    shape = shape_of("qwen1.5-moe-a2.7b", decoder_sparse_step=2)
    assert (shape["shared_d_ff"], shape["shared_gate"], shape["moe_pattern"]) == (5632, True, "DM")
    assert not shape["renormalised"]
    assert not shape_of("qwen1.5-moe-a2.7b", shared_expert_intermediate_size=0)["shared_gate"]


def test_what_published_files_say_without_effect():
    """Qwen3-Coder's files name parts that every model of the type has or lacks."""
    extra = {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}
    assert shape_of("qwen3-30b-a3b", **extra) == shape_of("qwen3-30b-a3b")
    with pytest.raises(ShapeError, match="key shared_expert_intermediate_size is 512"):
        shape_of("qwen3-30b-a3b", shared_expert_intermediate_size=512)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert shape_of("qwen3-8b", quantization_config=fp8) == shape_of("qwen3-8b")


def test_gpt_oss_trains_the_expanded_checkpoint():
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    assert shape_of("gpt-oss-20b", quantization_config=mxfp4) == shape_of("gpt-oss-20b")
    # A file without any rotary positions has the model's own.
    assert shape_of("gpt-oss-120b", rope_scaling=None)["rope"] == shape_of("gpt-oss-120b")["rope"]


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@given(name=st.sampled_from(sorted(PUBLISHED)), data=st.data(), is_inner=st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_value_of_any_key_is_read_or_refused(name, data, is_inner):
    config = dict(PUBLISHED[name]["config"])
    config[data.draw(st.sampled_from([*config, "text_config"]))] = data.draw(ANY_JSON)
    if is_inner:
        config = {"model_type": "gemma3", "text_config": config}
    with contextlib.suppress(WorkloadError):
        found = translate(config)
        get_workload(found.family, found.values)


@pytest.mark.parametrize("value", [[], ["llama"], {}, {"llama": 1}, 7])
def test_a_model_type_that_is_no_name_is_refused(value):
    found = translate({"model_type": "gemma3", "text_config": {"model_type": value}})
    with pytest.raises(WorkloadError):
        get_workload(found.family, found.values)
