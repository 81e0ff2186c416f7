"""Models built of the library's own modules: counts, FLOPs, scans, refusals (where it is installed)."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from fsdpbench.workloads import ShapeError, WorkloadError, get_workload
from fsdpbench.workloads.hf_config import translate
from fsdpbench.workloads.library import LIBRARY, LibraryShape, LibraryWorkload, packed

transformers: Any = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
BERT = {"model_type": "bert", **SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {
    "model_type": "bart",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
TINY = {"deepseek_v3": DEEPSEEK, "mamba2": MAMBA2, "qwen3_next": QWEN3_NEXT, "bert": BERT, "bart": BART}
QWEN_VL = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **SMALL,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2},
}


def built(content: dict[str, Any]) -> LibraryWorkload:
    return LibraryWorkload("hf:x", LibraryShape(packed(content)))


@pytest.mark.parametrize("name", TINY)
def test_a_model_has_the_librarys_parameters_and_gradients_for_all(name: str) -> None:
    found = translate(TINY[name])
    assert found.family == LIBRARY
    workload = get_workload("hf:x", {"family": found.family, **found.values})
    torch.manual_seed(0)
    model = workload.build("full", 32)
    assert sum(p.numel() for p in model.parameters()) == workload.parameters
    tokens, targets = next(workload.batches(2, 32, 0, 0, "cpu"))
    loss = model(tokens, targets)
    loss.backward()
    # What a checkpoint recomputes is what the model without it computes.
    torch.manual_seed(0)
    plain = workload.build("none", 32)
    torch.testing.assert_close(plain(tokens, targets), loss)
    plain(tokens, targets).backward()
    for (label, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=label)
    assert sum(p.grad is not None for p in model.parameters()) > 10


def test_blocks_are_the_outermost_lists_of_modules() -> None:
    assert [kind.__name__ for kind in built(MAMBA2).block_classes] == ["Mamba2Block"]
    assert {kind.__name__ for kind in built(BART).block_classes} == {"BartEncoderLayer", "BartDecoderLayer"}


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "tie_word_embeddings": True}])
def test_flops_are_those_of_our_own_build(changes: dict[str, Any]) -> None:
    """Counted as they are launched, and by our formula, block by block and with recomputation."""
    content = {"model_type": "qwen3", **SMALL, "head_dim": 16, **changes}
    ours = translate(content)
    own = get_workload("hf:x", {"family": ours.family, **ours.values})
    for checkpointing in ("none", "full", "every-2", "op"):
        assert built(content).flops_per_step(3, 48, checkpointing) == own.flops_per_step(3, 48, checkpointing)


def test_flops_of_experts_are_those_of_chosen_ones() -> None:
    found = built(DEEPSEEK).forward_flops(1, 32)
    (dense, mixed), tokens = found.stacks[0], 32
    each = 2 * 3 * 64 * 48  # gate, up and down of an expert
    shared = tokens * each
    routed = tokens * 2 * each
    router = 2 * tokens * 64 * 8
    assert mixed.total - dense.total == shared + routed + router - tokens * 2 * 3 * 64 * 96


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_scan_is_one_operator_where_tensors_have_no_values(name: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.name())
            if "_local_scalar_dense" in func.name():
                return True
            return func(*args, **(kwargs or {}))

    with torch.device("meta"):
        model = built(TINY[name]).build("none").to(torch.bfloat16)
    tokens = torch.zeros(1, 32, dtype=torch.int64, device="meta")
    with Names() as names:
        model(tokens, tokens).backward()
    scans = {"mamba2": 2, "qwen3_next": 3}[name]
    assert names.seen.count("fsdpbench_workloads::scan") == scans
    assert names.seen.count("fsdpbench_workloads::scan_backward") == scans
    trained = [p for p in model.parameters() if p.grad is None]
    assert trained == []


def test_the_text_model_inside_of_a_multimodal_one_and_the_whole() -> None:
    text = translate(QWEN_VL)
    workload = get_workload("hf:x", {"family": text.family, **text.values})
    settings = transformers.CONFIG_MAPPING["qwen2_5_vl"](
        **{key: value for key, value in QWEN_VL.items() if key != "model_type"}
    )
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(settings)
    inner = sum(p.numel() for p in whole.model.language_model.parameters())
    assert workload.parameters == inner  # its head is the embedding
    towers = translate(QWEN_VL, towers=True)
    workload = get_workload("hf:x", {"family": towers.family, **towers.values})
    assert workload.parameters == sum(p.numel() for p in whole.parameters())


def test_a_text_model_that_our_families_build_is_ours() -> None:
    text = {"model_type": "mistral", **SMALL, "head_dim": 16}
    found = translate(
        {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}}
    )
    assert (found.family, found.values["layers"]) == ("decoder", 2)


def test_a_key_that_only_the_library_reads_leads_to_its_modules() -> None:
    scaled = {"model_type": "llama", **SMALL, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert translate(scaled).family == LIBRARY
    with pytest.raises(ShapeError, match=r"key clip_qkv is 8\.0"):
        translate({"model_type": "llama", **SMALL, "clip_qkv": 8.0})  # nor does the library


def test_a_type_of_other_code_is_built_by_the_class_that_it_names() -> None:
    kimi = {**DEEPSEEK, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert built(kimi).parameters == built(DEEPSEEK).parameters


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model_type": "zzz"}, "neither our families nor transformers"),
        ({"model_type": "zzz", "auto_map": {"AutoModel": "a--b.C"}}, "is never run"),
        ({**DEEPSEEK, "hidden_size": "64"}, "expected int, got str"),
        ({**DEEPSEEK, "hidden_size": -64}, "cannot build it of these keys"),
        ({**DEEPSEEK, "num_hidden_layers": 10**9}, "at most 10,000"),
        ({**DEEPSEEK, "vocab_size": 10**30}, "no model is that large"),
        ({**DEEPSEEK, "hidden_act": "zap"}, "cannot build it of these keys"),
        ({**DEEPSEEK, "rope_scaling": {"type": "zap"}}, "cannot build it of these keys"),
        ({**DEEPSEEK, "architectures": ["DeepseekV3Model"]}, "without its language head"),
        ({**DEEPSEEK, "quantization_config": {"quant_method": "gptq"}}, "weights in few bits"),
        ({**MAMBA2, "num_hidden_layers": 0}, "it has no blocks"),
        ({"model_type": "t5gemma", "encoder": {"num_hidden_layers": 10**8}}, "at most 10,000"),
        ({"model_type": "vit"}, "no model of it that predicts words"),
    ],
)
def test_hostile_configurations_are_refused_by_name(content: dict[str, Any], told: str) -> None:
    with pytest.raises(ShapeError, match=told):
        translate(content)


def test_code_and_kernels_from_elsewhere_are_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("code of a file's own was asked for")

    dynamic = importlib.import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "get_class_from_dynamic_module", forbidden)
    hostile = {
        "auto_map": {"AutoConfig": "evil--m.C", "AutoModelForCausalLM": "evil--m.M"},
        "trust_remote_code": True,
        "_attn_implementation": "kernels-community/evil",
        "quantization_config": {"quant_method": "fp8"},
    }
    assert built({**MAMBA2, **hostile}).parameters == built(MAMBA2).parameters


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WorkloadError, match=r"'deepseek_v2': .* pip install 'fsdpbench\[hf\]'"):
        translate({"model_type": "deepseek_v2"})


def test_buffers_survive_materialisation() -> None:
    """A model built without memory gets the rotary tables that one built with memory has."""
    for content in (DEEPSEEK, QWEN3_NEXT):
        expected = built(content).build("none")
        with torch.device("meta"):
            model: Any = built(content).build("none")
        model.to_empty(device="cpu")
        model.reset_parameters()
        buffers = dict(model.named_buffers())
        for name, buffer in expected.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, msg=name)


def test_what_is_recorded_is_a_word() -> None:
    found = translate(DEEPSEEK)
    assert json.loads(json.dumps(dict(found.values))) == dict(found.values)
