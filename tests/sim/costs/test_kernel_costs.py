"""Kernel and host costs: measured tables within their errors, and what must be monotone is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import mean, median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry

from fsdpbench.sim.model.kernel_costs import CpuCosts, KernelCosts
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.torch_device.flops import FlopCount

A100 = KernelCosts(load_profile("a100-80gb"))


@pytest.mark.parametrize(
    ("name", "column", "typical", "average"),
    [
        ("a100-80gb", "A100_us", 0.05, 0.07),
        ("h100-80gb", "H100_us", 0.04, 0.06),
        ("h200", "H200_us", 0.05, 0.07),
    ],
)
def test_matrix_products_meet_the_measured_table(measured_table, name, column, typical, average):
    # The table was measured on chips that are not held back by a power limit.
    profile = load_profile(name)
    costs = KernelCosts(replace(profile, gemm=replace(profile.gemm, under_load=1.0)))
    errors = []
    for row in measured_table("gemm_tables.csv"):
        if row[column]:
            predicted = costs.gemm_ns(int(row["m"]), int(row["n"]), int(row["k"])) / 1e3
            errors.append(abs(predicted / float(row[column]) - 1))
    assert len(errors) >= 50
    assert median(errors) < typical
    assert mean(errors) < average


def test_attention_meets_the_measured_table(measured_table):
    costs = KernelCosts(replace(A100.profile, attention=replace(A100.profile.attention, under_load=1.0)))
    errors = []
    for row in measured_table("fa_fwd_tables.csv"):
        if row["A100_FA2_us"]:
            batch, heads, seq, kv = (int(row[key]) for key in ("batch", "heads", "seq", "kv"))
            predicted = costs.attention_forward_ns(batch, heads, seq, seq, 128, True, kv_heads=kv) / 1e3
            errors.append(abs(predicted / float(row["A100_FA2_us"]) - 1))
    assert len(errors) >= 50
    assert median(errors) < 0.04
    assert mean(errors) < 0.06


SIZES = st.sampled_from([1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 50304])


@settings(max_examples=150, deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES, dtype=st.sampled_from(["bf16", "tf32", "fp32"]))
def test_a_product_is_never_faster_than_the_hardware(m, n, k, dtype):
    profile = A100.profile
    bytes_per_element = 2 if dtype == "bf16" else 4
    flops = 2 * m * n * k / profile.peak_flops[dtype]
    traffic = bytes_per_element * (m * k + k * n + m * n) / profile.memory_bandwidth
    assert A100.gemm_ns(m, n, k, 1, dtype) >= max(flops, traffic) * 1e9


@settings(max_examples=100, deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES)
def test_a_longer_inner_dimension_or_a_larger_batch_takes_no_less(m, n, k):
    assert A100.gemm_ns(m, n, 2 * k) >= A100.gemm_ns(m, n, k)
    assert A100.gemm_ns(m, n, k, batch=4) >= A100.gemm_ns(m, n, k)


def test_a_few_tiles_more_than_the_multiprocessors_cost_a_round():
    # 108 multiprocessors: 128 tiles of 256 x 128 are two rounds, half empty.
    half_empty, full = A100.gemm_ns(1024, 4096, 8192), A100.gemm_ns(1024, 6144, 8192)
    assert full < 1.3 * half_empty  # of 1.5 times the work


def test_weight_gradients_are_slower():
    assert A100.gemm_ns(4096, 4096, 4096, kind="weight_grad") > A100.gemm_ns(4096, 4096, 4096)


def test_attention_grows_with_length_and_backward_costs_more():
    times = [A100.attention_forward_ns(2, 16, seq, seq, 128, True) for seq in (512, 1024, 2048, 4096, 8192)]
    ratios = [later / earlier for earlier, later in itertools.pairwise(times)]
    assert all(1.5 < ratio < 4.0 for ratio in ratios)
    assert ratios == sorted(ratios)
    backward = A100.attention_backward_ns(2, 16, 4096, 4096, 128, True)
    assert 2 * times[3] < backward < 5 * times[3]
    assert A100.attention_forward_ns(2, 16, 4096, 4096, 128, False) > 1.6 * times[3]
    assert A100.attention_forward_ns(2, 32, 4096, 4096, 64, True) > times[3]


def test_memory_bound_kernels_have_a_floor_and_reach_their_bandwidth():
    assert A100.memory_bound_ns(0) == A100.memory_bound_ns(1)
    assert A100.memory_bound_ns(0) > 1000
    gigabyte = A100.memory_bound_ns(10**9)
    assert 0.4 < 10**9 / gigabyte * 1e9 / A100.profile.memory_bandwidth < 1.0
    assert A100.memory_bound_ns(10**8, "never heard of") == A100.memory_bound_ns(10**8, "pointwise")
    assert A100.memory_bound_ns(10**8, "copy") > A100.memory_bound_ns(10**8, "pointwise")


@pytest.mark.parametrize(
    "call",
    [
        lambda: A100.gemm_ns(1, 1, 1, dtype="fp64"),
        lambda: A100.gemm_ns(1, 1, 1, kind="backward"),
        lambda: A100.attention_forward_ns(1, 1, 1, 1, 64, True, "fp8"),
    ],
)
def test_unknown_types_and_kinds_are_refused(call):
    with pytest.raises(ValueError, match="known are"):
        call()


def test_host_costs_are_integer_nanoseconds():
    costs = CpuCosts.of(load_profile("a100-80gb"))
    for slot in costs.__slots__:
        assert isinstance(getattr(costs, slot), int)
    assert costs.collective_ns > costs.operator_ns > costs.view_ns > 0


def test_flops_of_scaled_products_count_elements() -> None:
    """Two of nvfp4's elements are in a byte."""
    found = []
    for dtype, packed in ((torch.float8_e4m3fn, 1), (torch.float4_e2m1fn_x2, 2)):
        a = torch.empty(32, 64 // packed, dtype=dtype, device="meta")
        b = torch.empty(48, 64 // packed, dtype=dtype, device="meta").t()
        for operator in (torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default):
            counted = FlopCount().of_call(operator, (a, b), {}, torch.empty(32, 48), "kind")
            found.append(counted)
    assert found == [("kind", 2 * 32 * 64 * 48)] * 4


def test_flops_of_attention_are_those_of_as_many_heads_of_keys() -> None:
    """Torch 2.11's own formulas refuse keys with fewer heads than queries."""
    aten, starts = torch.ops.aten, torch.tensor([0, 16, 48], dtype=torch.int32)
    query, packed = torch.empty(2, 8, 16, 64, device="meta"), torch.empty(48, 8, 64, device="meta")
    for operator, before, after in (
        (aten._scaled_dot_product_cudnn_attention, [query], []),
        (aten._scaled_dot_product_flash_attention_backward, [query, query], []),
        (aten._flash_attention_forward, [packed], [starts, starts, 32, 32]),
        (aten._flash_attention_backward, [packed, packed], [packed, packed, starts, starts, 32, 32]),
    ):
        all_heads, fewer = before[0], before[0][:, :2]
        expected = flop_registry[operator](*before, all_heads, all_heads, *after, out_val=query)
        counted = FlopCount().of_call(operator.default, [*before, fewer, fewer, *after], {}, query, "bf16")
        assert counted == ("bf16", expected), operator
        assert expected > 0
