"""Current models through the command line: a simulated step of each, losses of small ones on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.campaign

MODELS = json.loads((Path(__file__).parents[2] / "data" / "current_models.json").read_text())
MANY_EXPERTS = 256
"""GPUs from which models are simulated on B300, as their blocks do not fit in 80 GB."""
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **SMALL, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    },
    "llama4_text": {
        **SMALL, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 16,
    },
    "mamba2": {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_heads": 8, "head_dim": 16,
        "state_size": 16, "n_groups": 2, "chunk_size": 16,
    },
    "nemotron_h": {
        **SMALL, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*-", "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        "head_dim": 16, "chunk_size": 16, "n_group": 1, "topk_group": 1,
    },
    "qwen3_next": {
        **SMALL, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "bart": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "vocab_size": 128, "max_position_embeddings": 64, "dropout": 0.0,
    },
    "modernbert": {
        **SMALL, "global_attn_every_n_layers": 2, "local_attention": 16, "cls_token_id": 1,
        "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""Configurations by type: latent attention, experts, scans, encoders."""


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_simulated(fsdpbench: Any, tmp_path: Path, name: str) -> None:
    entry = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    hardware = "b300" if entry["gpus"] >= MANY_EXPERTS else "h100-80gb"
    words = ("--device", "sim", "--hardware", hardware, "--gpus", str(entry["gpus"]), "--wrap", "block")
    dtypes = ("--param-dtype", entry.get("param_dtype", "bf16"), "--reduce-dtype", "fp32")
    place = ("--system", "torch-fsdp2", "-o", str(tmp_path / "out"), "--json", *dtypes)
    done = fsdpbench("run", "--hf-config", str(tmp_path / "config.json"), *words, *place)
    result = json.loads(done.stdout)
    assert result["status"] == "ok", result["cause"]
    state = 12 * result["parameters"] / entry["gpus"]  # fp32 weights and two moments
    assert result["peak_memory_bytes"]["allocated"] > state
    assert 0.0005 < result["mfu"] < 0.65


@pytest.mark.parametrize("kind", TINY)
def test_losses_do_not_hang_on_what_shards_the_model(fsdpbench: Any, tmp_path: Path, kind: str) -> None:
    """On two CPU ranks under each system, and on one rank with and without FSDP."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **TINY[kind]}))
    common = ("--hf-config", str(file), "--device", "cpu", "--param-dtype", "fp32", "--seq", "32", "--json")

    def losses(gpus: int, systems: str) -> dict[str, list[float]]:
        place = ("--gpus", str(gpus), "--system", systems, "-o", str(tmp_path / f"out{gpus}"))
        fixed = ("--batch", "2", "--wrap", "block", "--backward-prefetch", "pre", "--limit-all-gathers", "2")
        alone = ("--strategy", "FULL_SHARD", "--activation-checkpointing", "none")
        results = json.loads(fsdpbench("sweep", *common, *place, *fixed, *alone).stdout)["results"]
        assert {result["status"] for result in results} == {"ok"}, [r["cause"] for r in results]
        return {result["name"]: result["loss"][:8] for result in results}

    for found in (
        losses(2, "torch-ddp,torch-fsdp2,impl-fsdp2,torch-fsdp1,impl-fsdp1"),
        losses(1, "single,torch-fsdp2"),
    ):
        first, *rest = found.values()
        assert rest
        assert first[0] != first[-1]
        for values in rest:
            assert values == pytest.approx(first, rel=2e-5)
