"""FLOP formulas against torch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from workloads import get_workload

SHAPE = {"layers": 5, "d_model": 64, "heads": 4, "vocab": 128, "max_seq": 96}


def counted_flops(workload, batch, seq, activation_checkpointing):
    # Attention by matrix products: fused kernels recompute inside, which neither formula nor MFU counts.
    with torch.device("meta"):
        model = workload.build(activation_checkpointing, seq)
        inputs = torch.zeros(batch, seq, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(inputs, inputs).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("activation_checkpointing", ["none", "full", "every-2", "every-9", "op"])
@pytest.mark.parametrize(
    "overrides", [{}, {"tied": True, "expansion": 2}, {"bias": False, "positions": "none"}]
)
def test_formula_equals_the_counter(activation_checkpointing, overrides):
    workload = get_workload("gpt", shape=SHAPE | overrides)
    flops = workload.flops_per_step(3, 96, activation_checkpointing)
    counted = counted_flops(workload, 3, 96, activation_checkpointing)
    assert flops.hardware == pytest.approx(counted, rel=0.01)
    plain = counted_flops(workload, 3, 96, "none")
    assert flops.model == pytest.approx(plain, rel=0.01)


def test_full_size_agrees_too():
    workload = get_workload("gpt-1.3b")
    assert workload.flops_per_step(1, 512, "full").hardware == pytest.approx(
        counted_flops(workload, 1, 512, "full"), rel=0.01
    )


def test_recomputation_is_hardware_work_only():
    workload = get_workload("gpt-2.8b")
    none, full = (workload.flops_per_step(2, 2048, ac) for ac in ("none", "full"))
    assert none.model == none.hardware == full.model
    # The lm head is not recomputed, so a little less than the 4/3 of the blocks alone.
    assert 1.25 < full.hardware / full.model < 4 / 3


def test_a_token_costs_what_palm_counts():
    workload = get_workload("gpt-2.8b")
    matrix_weights = 32 * 12 * 2560**2 + 50304 * 2560
    per_token = 6 * matrix_weights + 12 * 32 * 2560 * 2048
    assert workload.flops_per_step(4, 2048).model == 4 * 2048 * per_token
    assert workload.tokens(4, 2048) == 8192
    assert workload.samples(4) == 4
