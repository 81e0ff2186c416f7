"""Model types that families of ours build already: GPT-2 and T5."""

from __future__ import annotations

from typing import Any

from fsdpbench.workloads.hf_config.keys import Keys

Values = dict[str, Any]


def gpt2(keys: Keys) -> Values:
    """GPT-2: learned positions, as many as `n_positions`."""
    d_model, inner = keys.whole("n_embd", 768), keys.whole("n_inner", 0)
    if inner and (not d_model or inner % d_model):
        raise keys.misfit("n_inner", inner, f"null, or a multiple of n_embd, {d_model}")
    drops = {name: keys.number(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    for name, value in drops.items():
        if value != drops["resid_pdrop"]:
            raise keys.misfit(name, value, f"what resid_pdrop is, {drops['resid_pdrop']}")
    keys.must_be("layer_norm_epsilon", 1e-5)
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("reorder_and_upcast_attn", False)
    keys.must_be("add_cross_attention", False)
    # Our GPTs compute GELU itself, by one kernel as its approximation by tanh would be.
    keys.must_be("activation_function", "gelu_new", "gelu", "gelu_pytorch_tanh")
    keys.ignore("n_ctx", *(f"summary_{name}" for name in _SUMMARY))  # summaries: heads of other tasks
    return {
        "layers": keys.whole("n_layer", 12),
        "d_model": d_model,
        "heads": keys.whole("n_head", 12),
        "vocab": keys.whole("vocab_size", 50257),
        "tied": keys.flag("tie_word_embeddings", True),
        "expansion": inner // d_model if inner else 4,
        "max_seq": keys.whole("n_positions", 1024),
        "dropout": drops["resid_pdrop"],
    }


_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
_FEED_FORWARDS = {"relu": "", "gated-gelu": "gated"}


def t5(keys: Keys) -> Values:
    """T5 and T5 1.1."""
    layers = keys.whole("num_layers", 6)
    decoder_layers = keys.whole("num_decoder_layers", layers)
    if decoder_layers != layers:
        raise keys.misfit("num_decoder_layers", decoder_layers, f"what num_layers is, {layers}")
    keys.must_be("relative_attention_max_distance", 128)
    keys.must_be("layer_norm_epsilon", 1e-6)
    tied = keys.flag("tie_word_embeddings", True)
    keys.must_be("scale_decoder_outputs", tied)
    keys.ignore("dense_act_fn", "is_gated_act")  # parts of feed_forward_proj
    return {
        "layers": layers,
        "d_model": keys.whole("d_model", 512),
        "d_ff": keys.whole("d_ff", 2048),
        "heads": keys.whole("num_heads", 8),
        "d_kv": keys.whole("d_kv", 64),
        "vocab": keys.whole("vocab_size", 32128),
        "gated": bool(keys.word("feed_forward_proj", "relu", _FEED_FORWARDS)),
        "tied": tied,
        "buckets": keys.whole("relative_attention_num_buckets", 32),
        "max_seq": keys.whole("n_positions", 512),
        "dropout": keys.number("dropout_rate", 0.1),
    }
