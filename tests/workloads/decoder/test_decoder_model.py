"""The decoder's own behaviour; `hf_config/test_against_transformers` holds its numbers to the library's."""

import pytest
import torch
from torch.nn import functional as F

from fsdpbench.workloads import ShapeError, get_workload

SMALL = {
    "layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "kv_heads": 2, "vocab": 64, "max_seq": 24,
}  # fmt: skip
MIXTURE = {"experts": 4, "expert_d_ff": 24, "experts_per_token": 2, "moe_pattern": "M"}
KINDS = {
    "llama": {},
    "gemma": {
        "head_width": 16, "qk_norm": True, "post_norms": True, "norm": "rms-offset", "window": 6,
        "layer_pattern": "SF", "local_theta": 100.0, "tied": True, "embedding_scale": True,
        "score_cap": 30.0, "logit_cap": 20.0, "attention": "explicit",
    },
    "phi": {
        "kv_heads": 4, "norm": "layer", "parallel": True, "gated": False, "mlp_bias": True, "qkv_bias": True,
        "output_bias": True, "head_bias": True, "rotary_share": 0.5, "activation": "gelu-tanh",
    },
    "phi3": {"fused_projections": True, "window": 6, "layer_pattern": "S"},
    "mixture": {**MIXTURE, "moe_pattern": "DM"},
    "gpt-oss": {
        **MIXTURE, "router_load": "skewed", "router_bias": True, "expert_bias": True, "clamped": True,
        "sinks": True, "attention": "explicit", "norms": "composed",
    },
}  # fmt: skip


def build(kind, seed=0, **fields):
    torch.manual_seed(seed)
    return get_workload("decoder", SMALL | KINDS[kind] | fields).build()


@pytest.fixture
def tokens():
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_cross_entropy_and_every_parameter_learns(kind, tokens):
    model = build(kind)
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A bias that all keys share changes no softmax.
    assert [name for name in silent if not name.endswith("key.bias")] == []
    workload = get_workload("decoder", SMALL | KINDS[kind])
    assert workload.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one(kind, tokens):
    model = build(kind)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-5)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-4)


def test_a_window_hides_what_lies_behind_it(tokens):
    """Two layers of windows of 3 tokens: token 9 sees 2 x 2 tokens back, and no more."""
    model = build("llama", window=3, layer_pattern="S")
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, 9:], after[:, 9:], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 8], after[:, 8], atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_attention_is_the_same_fused_or_explicit(kind, tokens):
    fused, explicit = build(kind), build(kind, attention="explicit")
    explicit.load_state_dict(fused.state_dict())
    torch.testing.assert_close(explicit(tokens), fused(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norms_are_the_same_fused_or_composed(kind, tokens):
    fused, composed = build(kind), build(kind, norms="composed")
    composed.load_state_dict(fused.state_dict())
    torch.testing.assert_close(composed(tokens), fused(tokens), rtol=1e-4, atol=1e-5)


def test_llama_is_the_family_llama_with_other_names(tokens):
    """The same shape and weights in the family that was there before."""
    fields = {name: SMALL[name] for name in SMALL}
    torch.manual_seed(0)
    llama = get_workload("llama", fields).build()
    ours = build("llama")
    ours.load_state_dict(llama.state_dict())
    torch.testing.assert_close(ours(tokens), llama(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kv_heads": 3}, "kv_heads"),
        ({"heads": 5, "kv_heads": 5}, "heads"),
        ({"rotary_share": 0.0}, "rotary_share"),
        ({"rope": "ntk"}, "rope"),
        ({"rope": "yarn:factor=0"}, "rope"),
        ({"layer_pattern": "SF"}, "give them a window"),
        ({"layer_pattern": "X"}, "layer_pattern"),
        ({"sinks": True}, "attention=explicit"),
        ({"score_cap": 5.0}, "attention=explicit"),
        ({"moe_pattern": "M"}, "experts"),
        ({**MIXTURE, "experts_per_token": 5}, "experts_per_token"),
        ({"router_load": "learned"}, "router_load"),
        ({"parallel": True, "post_norms": True}, "parallel"),
        ({"window": -1}, "window"),
    ],
)
def test_impossible_shapes_are_refused(fields, told):
    with pytest.raises(ShapeError, match=told):
        get_workload("decoder", SMALL | fields)
