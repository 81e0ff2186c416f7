"""Weights of the library's own models under the names of ours."""

import pytest
import torch

OUTER = {
    "model.embed_tokens": "token_embedding",
    "model.norm": "final_norm",
    "model.final_layernorm": "final_norm",
    "lm_head": "lm_head",
}
INNER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.output",
    "self_attn.dense": "attention.output",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "self_attn.sinks": "attention.sinks",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.gate_up_proj": "feed_forward.gate_up",
    "mlp.down_proj": "feed_forward.down",
    "mlp.fc1": "feed_forward.up",
    "mlp.fc2": "feed_forward.down",
    "mlp.gate": "feed_forward.router",
    "mlp.router": "feed_forward.router",
    "mlp.experts.gate_up_proj": "feed_forward.experts.gate_up",
    "mlp.experts.gate_up_proj_bias": "feed_forward.experts.gate_up_bias",
    "mlp.experts.down_proj": "feed_forward.experts.down",
    "mlp.experts.down_proj_bias": "feed_forward.experts.down_bias",
}
SANDWICH = {
    "post_attention_layernorm": "after_attention",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "post_feedforward_layernorm": "after_feed_forward",
}


@pytest.fixture
def our_state():
    """(state dict of the library's, model type) -> that of ours."""
    return _our_state


def _our_state(theirs, model_type):
    """The state dict of our module that holds what `theirs`, a state dict of the library's, holds."""
    inner = INNER | (SANDWICH if model_type.startswith(("gemma2", "gemma3")) else {})
    state = {}
    for name, tensor in theirs.items():
        stem, _, kind = name.rpartition(".")
        if stem in OUTER:
            state[f"{OUTER[stem]}.{kind}"] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, _, kind = rest.rpartition(".")
        if rest in inner:
            state[f"blocks.{layer}.{inner[rest]}"] = _flat(tensor, rest, model_type)
        else:
            state[f"blocks.{layer}.{inner[stem]}.{kind}"] = tensor
    return state


def _flat(tensor, name, model_type):
    """Experts' weights as [experts x in, out], gate before up; biases in one row."""
    if name.endswith("sinks"):
        return tensor
    if model_type != "gpt_oss":
        tensor = tensor.transpose(1, 2)
    elif "gate_up" in name:  # theirs alternate
        tensor = torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1)
    return tensor.flatten() if name.endswith("bias") else tensor.flatten(0, 1)
