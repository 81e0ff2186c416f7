"""Adapters: what is frozen, what is trained, what it computes and costs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdpbench.workloads import WorkloadError, get_workload
from fsdpbench.workloads.lora import Lora, LoraWorkload
from fsdpbench.workloads.lora_layers import dequantise

PHI = {
    "layers": 3, "d_model": 64, "d_ff": 96, "heads": 4, "kv_heads": 4, "vocab": 128, "norm": "layer",
    "parallel": True, "gated": False, "mlp_bias": True, "qkv_bias": True, "rotary_share": 0.5,
}  # fmt: skip
CASES = [
    ("decoder-tiny", {"layers": 3}, "all"),
    ("decoder-tiny", {"layers": 3}, "attention"),
    ("decoder-tiny", {"layers": 3, "fused_projections": True}, "query_key_value+down"),
    ("decoder-tiny", {"layers": 3, "post_norms": True}, "down"),
    ("llama-tiny", {"layers": 3}, "gate+up"),
    ("decoder", PHI, "all"),
    ("gpt-tiny", {"layers": 3}, "all"),
    ("gpt-tiny", {"layers": 3, "dropout": 0.1}, "up"),
    ("moe-tiny", {"layers": 3}, "all"),
    ("moe-tiny", {"layers": 3, "router_load": "skewed", "tied": True}, "attention"),
]


def adapted(name, shape, targets, rank=4, dtype="fp32"):
    return LoraWorkload(get_workload(name, shape), Lora(rank, targets, dtype))


def counted(workload, checkpointing):
    tensors = [tensor.to("meta") for tensor in next(workload.batches(3, 48, 0, 0, "cpu"))]
    with torch.device("meta"):
        model = workload.build(checkpointing, 48)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*tensors).backward()
    return counter.get_total_flops()


@pytest.mark.plain_cases("full-moe-tiny-shape9")
@pytest.mark.parametrize(("name", "shape", "targets"), CASES)
@pytest.mark.parametrize("checkpointing", ["none", "full", "every-2", "op", "op-every-3"])
def test_flops_are_those_that_torch_counts(checkpointing, name, shape, targets):
    workload = adapted(name, shape, targets)
    count = counted(workload, checkpointing)
    flops = workload.flops_per_step(3, 48, checkpointing)
    assert flops.hardware == pytest.approx(count, rel=0.001)
    if checkpointing == "none":
        assert flops.model == flops.hardware


@pytest.mark.parametrize(("name", "shape", "targets"), CASES)
def test_adapters_alone_are_trained_and_counted(name, shape, targets):
    workload = adapted(name, shape, targets, dtype="bf16")
    with torch.device("meta"):
        model = workload.build()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in n and p.dtype is torch.float32 for n, p in trained.items())
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert workload.adapter_parameters == sum(p.numel() for p in trained.values())
    assert workload.parameters == sum(p.numel() for p in model.parameters())
    frozen_bytes = 2 * sum(p.numel() for p in frozen)
    assert workload.training_state_bytes == frozen_bytes + 16 * workload.adapter_parameters
    assert not any("router" in n or "experts" in n for n in trained)


def test_an_adapter_adds_its_two_products_to_the_layer():
    torch.manual_seed(0)
    plain = get_workload("decoder-tiny", {"layers": 2})
    workload = adapted("decoder-tiny", {"layers": 2}, "all")
    tokens = torch.randint(512, (2, 16))
    torch.manual_seed(3)
    base = plain.build()
    torch.manual_seed(3)
    model = workload.build()
    torch.testing.assert_close(model(tokens), base(tokens), rtol=1e-5, atol=1e-6)  # B begins at zero
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.2)
        merged = dict(base.named_parameters())
        for name, module in model.named_modules():
            if hasattr(module, "lora_a"):
                merged[f"{name}.weight"] += 2.0 * module.lora_b @ module.lora_a
    torch.testing.assert_close(model(tokens), base(tokens), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "targets"), [("decoder-tiny", "attention"), ("moe-tiny", "all"), ("gpt-tiny", "all")]
)
def test_a_base_in_4_bits_computes_with_its_nearest_levels(name, targets):
    torch.manual_seed(0)
    plain = get_workload(name, {"layers": 2})
    workload = LoraWorkload(plain, Lora(4, targets, "fp32", four_bit=True))
    torch.manual_seed(3)
    base = plain.build()
    torch.manual_seed(3)
    model = workload.build()
    rounded = {}
    for layer, module in model.named_modules():
        if getattr(module, "weight_scale", None) is not None:
            assert module.weight.dtype is torch.uint8
            rounded[layer] = dequantise(module.weight.detach(), module.weight_scale.detach())
            error = (rounded[layer] - base.get_parameter(f"{layer}.weight")).abs()
            assert error.max() <= 0.16 * base.get_parameter(f"{layer}.weight").abs().max()
    assert len(rounded) == sum(len(plain.products(i)) for i in range(2)) - (2 * ("moe" in name))
    with torch.no_grad():
        for layer, weight in rounded.items():
            base.get_parameter(f"{layer}.weight").copy_(weight)
    batch = next(plain.batches(2, 16, 0, 0, "cpu"))
    for each in (model, base):
        each(*batch).backward()
    torch.testing.assert_close(model(*batch), base(*batch), rtol=1e-5, atol=1e-6)
    rank = model.blocks[0].get_parameter(
        next(n for n, _ in model.blocks[0].named_parameters() if "lora_b" in n)
    )
    assert rank.grad.abs().max() > 0
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert sum(p.nbytes for p in frozen) + 16 * workload.adapter_parameters == workload.training_state_bytes


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(WorkloadError, match="a layer with 60 inputs does not divide into blocks of 8"):
        LoraWorkload(get_workload("gpt-tiny", {"d_model": 60, "heads": 4}), Lora(4, four_bit=True))


def test_tied_weights_stay_one():
    model = adapted("decoder-tiny", {"tied": True}, "all").build()
    assert model.lm_head.weight is model.token_embedding.weight


@pytest.mark.parametrize(
    ("name", "targets", "told"),
    [
        ("t5-tiny", "all", "family t5"),
        ("llama-tiny", "qkv", "no layer 'qkv'; it has down, gate"),
        ("llama-tiny", "query+gait", "no layer 'gait'"),
        ("moe-tiny", "router", "no layer 'router'"),
    ],
)
def test_models_and_layers_without_adapters_are_refused(name, targets, told):
    with pytest.raises(WorkloadError, match=told):
        adapted(name, None, targets)
