"""FLOP formulas against torch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from fsdpbench.workloads import get_workload

GPT = {"layers": 3, "d_model": 64, "heads": 4, "vocab": 128, "max_seq": 96}
# Torch counts the weight gradient of a convolution in G groups G times over: its backward is compared where
# there is one group, and grouped convolutions by their forward.
ONE_GROUP = {"widths": "32-32", "depths": "2-3", "group_width": 32}
CASES = [
    ("gpt", GPT),
    ("gpt", GPT | {"tied": True, "expansion": 2, "bias": False, "positions": "none"}),
    ("t5-tiny", {"layers": 3}),
    ("t5-tiny", {"gated": True, "tied": False, "attention": "explicit"}),
    ("llama-tiny", {"layers": 3}),
    ("llama-tiny", {"kv_heads": 4, "tied": True}),
    ("regnet-tiny", ONE_GROUP),
    ("deepvit-tiny", {}),
    ("dhen-tiny", {"layers": 3}),
    ("decoder-tiny", {"layers": 3, "fused_projections": True, "window": 8, "layer_pattern": "SF"}),
    ("decoder-tiny", {"qk_norm": True, "post_norms": True, "head_width": 48, "norm": "rms-offset"}),
    ("decoder-tiny", {"parallel": True, "gated": False, "norm": "layer", "residual_dropout": 0.1}),
    ("moe-tiny", {"layers": 3, "moe_pattern": "DMM"}),
    ("moe-tiny", {"layers": 3, "router_load": "skewed", "expert_bias": True}),
    ("moe-tiny", {"sinks": True, "attention": "explicit", "clamped": True, "router_bias": True}),
]


def counted_flops(workload, batch, seq, activation_checkpointing, backward=True):
    tensors = next(workload.batches(batch, seq, 0, 0, "cpu"))
    with torch.device("meta"):
        model = workload.build(activation_checkpointing, seq)
    tensors = [tensor.to("meta") for tensor in tensors]
    # Attention by matrix products: fused kernels recompute inside, which neither formula nor MFU counts.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(*tensors)
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.plain_cases("shape0", "shape5")
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_formula_equals_the_counter(name, shape):
    workload = get_workload(name, shape=shape)
    seq = None if workload.default_seq is None else 48
    counted = {
        ac: counted_flops(workload, 3, seq, ac) for ac in ("none", "full", "every-2", "op", "op-every-3")
    }
    if "vocab" in workload.shape:
        counted["full:1"] = counted_flops(workload, 3, seq, "full:1")
    for activation_checkpointing, count in counted.items():
        flops = workload.flops_per_step(3, seq, activation_checkpointing)
        assert flops.hardware == pytest.approx(count, rel=0.01), activation_checkpointing
        assert flops.model == pytest.approx(counted["none"], rel=0.01)


@pytest.mark.plain_cases("dhen")
@pytest.mark.parametrize(
    ("name", "seq"),
    [
        ("gpt-1.3b", 512),
        pytest.param("t5-11b", 512, marks=pytest.mark.campaign),
        pytest.param("llama3-8b", 512, marks=pytest.mark.campaign),
        pytest.param("deepvit-8b", None, marks=pytest.mark.campaign),
        ("dhen", None),
    ],
)
def test_full_size_agrees_too(name, seq):
    workload = get_workload(name)
    assert workload.flops_per_step(1, seq, "full").hardware == pytest.approx(
        counted_flops(workload, 1, seq, "full"), rel=0.01
    )


@pytest.mark.plain_cases("regnet-y")
@pytest.mark.parametrize("name", ["regnet-y-32gf", "regnet-9b"])
def test_grouped_convolutions_agree_in_forward(name):
    workload = get_workload(name)
    # The stem's input needs no gradient, so the model's FLOPs are a little less than three forward passes.
    assert workload.flops_per_step(2).model / 3 == pytest.approx(
        counted_flops(workload, 2, None, "none", backward=False), rel=0.01
    )


def test_regnet_32gf_costs_its_name():
    # "32GF": 32.3e9 multiply-adds an image, 2 FLOPs each.
    assert get_workload("regnet-y-32gf").flops_per_step(1).model / 3 == pytest.approx(2 * 32.3e9, rel=0.01)


def test_recomputation_is_hardware_work_only():
    workload = get_workload("gpt-2.8b")
    none, full, op, all_products = (
        workload.flops_per_step(2, 2048, ac) for ac in ("none", "full", "op", "op-every-1")
    )
    assert none.model == none.hardware == full.model == op.model == all_products.hardware
    in_full = workload.flops_per_step(2, 2048, "full", recomputes_in_full=True)
    # The lm head is not recomputed, so a little less than the 4/3 of the blocks alone.
    assert 1.25 < in_full.hardware / in_full.model < 4 / 3
    layers, width, tokens = 32, 2560, 2 * 2048
    assert in_full.hardware - full.hardware == layers * 2 * tokens * 4 * width**2  # the last product, down
    assert op.hardware - op.model == layers * 2 * tokens * width**2  # the second, attention's projection


@pytest.mark.plain_cases("shape0", "shape3")
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_in_full_equals_the_counter_without_early_stop(name, shape):
    workload = get_workload(name, shape=shape)
    seq = None if workload.default_seq is None else 48
    with set_checkpoint_early_stop(False):
        counted = counted_flops(workload, 3, seq, "full")
    flops = workload.flops_per_step(3, seq, "full", recomputes_in_full=True)
    assert flops.hardware == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_dropout_needs_the_last_product_again(family):
    workload = get_workload(f"{family}-tiny", shape={"dropout": 0.1})
    counted = counted_flops(workload, 3, 48, "full")
    assert workload.flops_per_step(3, 48, "full").hardware == pytest.approx(counted, rel=0.01)


def test_a_token_costs_what_palm_counts():
    workload = get_workload("gpt-2.8b")
    matrix_weights = 32 * 12 * 2560**2 + 50304 * 2560
    per_token = 6 * matrix_weights + 12 * 32 * 2560 * 2048
    assert workload.flops_per_step(4, 2048).model == 4 * 2048 * per_token


def test_what_each_field_counts():
    counts = {
        name: (get_workload(name).samples(4), get_workload(name).tokens(4))
        for name in ("gpt-2.8b", "t5-11b", "llama3-8b", "regnet-9b", "deepvit-8b", "dhen")
    }
    assert counts == {
        "gpt-2.8b": (4, 4 * 2048),
        "t5-11b": (4, 4 * 1024),  # source and target
        "llama3-8b": (4, 4 * 8192),
        "regnet-9b": (4, None),
        "deepvit-8b": (4, None),
        "dhen": (4, None),
    }
