"""Library tables of profiles: curves by number of ranks, factors on shapes, narrow products, mistakes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import fsdpbench.sim.model.profile as hardware
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.library_costs import factors_at
from fsdpbench.sim.model.network import Network, curve_seconds
from fsdpbench.sim.model.profile import ProfileError, load_profile, parse_profile
from fsdpbench.sim.model.sections import FactorGrid, LibraryTables, RankCurve
from fsdpbench.sim.torch_device.prices import price

MIB = 1 << 20
B200 = load_profile("b200")


def _tables(switch_from: int) -> LibraryTables:
    curves = (
        RankCurve(4, ((MIB, 10.0), (4 * MIB, 20.0))),
        RankCurve(8, ((MIB, 30.0), (4 * MIB, 40.0))),
    )
    return LibraryTables("1", "a test", collectives={"all_gather": curves}, switch_from=switch_from)


def test_curves_are_straight_in_the_logarithms_and_go_on_by_their_ends() -> None:
    tables = _tables(0)
    assert curve_seconds(tables, "all_gather", 2 * MIB, 4) == pytest.approx(1e-6 * 200**0.5)
    assert curve_seconds(tables, "all_gather", 100, 4) == pytest.approx(10e-6)
    assert curve_seconds(tables, "all_gather", 40 * MIB, 4) == pytest.approx(200e-6)
    assert curve_seconds(tables, "broadcast", MIB, 8) == pytest.approx(30e-6)
    assert curve_seconds(tables, "all_reduce", MIB, 8) is None


def test_between_numbers_of_ranks_the_switch_makes_a_step() -> None:
    smooth = [curve_seconds(_tables(0), "all_gather", MIB, ranks) for ranks in (4, 5, 6, 7, 8)]
    assert smooth == sorted(smooth)  # type: ignore[type-var]
    assert smooth[1] == pytest.approx(10e-6 * 3 ** (np.log(5 / 4) / np.log(2)))
    five, six = (curve_seconds(_tables(6), "all_gather", MIB, ranks) for ranks in (5, 6))
    assert five is not None
    assert six is not None
    assert five < 11e-6
    assert six == pytest.approx(30e-6, rel=0.05)


def test_factors_are_linear_in_the_logarithms_and_flat_outside() -> None:
    grid = FactorGrid(((1.0, 4.0), (1.0, 16.0)), (1.0, 4.0, 1.0, 16.0))
    x, y = np.array([1.0, 2.0, 4.0, 99.0]), np.array([4.0, 4.0, 16.0, 99.0])
    assert factors_at(grid, x, y) == pytest.approx([2.0, 8**0.5, 16.0, 16.0])


def test_runs_use_the_tables_only_where_the_profile_says_so() -> None:
    size = 16 * MIB
    measured = curve_seconds(B200.libraries["nccl"], "all_gather", size, 8)
    assert measured is not None
    used = Network(B200, 8, 8).collective_ns("all_gather", size, range(8))
    assert used == round(measured * 1e9)
    assert 90e-6 < measured < 115e-6  # the change of protocol there, from related curves
    h100 = load_profile("h100-80gb")
    bare = dataclasses.replace(h100, libraries={})
    assert h100.libraries
    for costs, network in ((KernelCosts(p), Network(p, 8, 8)) for p in (h100, bare)):
        assert costs.gemm_ns(4096, 4096, 4096) == KernelCosts(bare).gemm_ns(4096, 4096, 4096)
        assert network.collective_ns("all_reduce", size, range(8)) == Network(bare, 8, 8).collective_ns(
            "all_reduce", size, range(8)
        )


def test_weight_gradients_and_load_slow_a_table_s_products() -> None:
    costs = KernelCosts(B200)
    assert costs.gemm_ns(8192, 8192, 8192, kind="weight_grad") > 1.3 * costs.gemm_ns(8192, 8192, 8192)
    warm = dataclasses.replace(B200, gemm=dataclasses.replace(B200.gemm, under_load=0.5))
    assert KernelCosts(warm).gemm_ns(8192, 8192, 8192) > 1.5 * costs.gemm_ns(8192, 8192, 8192)


@pytest.mark.parametrize("name", ["b200", "b300", "gb200", "gb300", "rtx-pro-6000"])
def test_narrow_products_are_faster(name: str) -> None:
    costs = KernelCosts(load_profile(name))
    bf16, fp8, nvfp4 = (costs.gemm_ns(8192, 8192, 8192, dtype=dtype) for dtype in ("bf16", "fp8", "nvfp4"))
    assert bf16 > 1.4 * fp8
    assert fp8 > 1.3 * nvfp4


def test_a_chip_without_narrow_products_runs_them_in_16_bits() -> None:
    costs = KernelCosts(load_profile("a100-80gb"))
    assert costs.gemm_ns(4096, 4096, 4096, dtype="fp8") == costs.gemm_ns(4096, 4096, 4096)


@pytest.mark.parametrize(
    ("dtype", "name", "packed"), [(torch.float8_e4m3fn, "fp8", 1), (torch.float4_e2m1fn_x2, "nvfp4", 2)]
)
def test_scaled_products_cost_what_the_table_says(dtype: torch.dtype, name: str, packed: int) -> None:
    costs = KernelCosts(B200)
    a, b = (torch.empty(2048, 4096 // packed, dtype=dtype, device="meta") for _ in range(2))
    out = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")
    cost = price(torch.ops.aten._scaled_mm.default, (a, b.t()), {}, out, costs)
    assert cost.duration_ns == costs.gemm_ns(2048, 2048, 4096, dtype=name, comes_quantised=True)
    # The libraries' operators cast the first factor, too; torch does that before, in operators of its own.
    assert cost.duration_ns < costs.gemm_ns(2048, 2048, 4096, dtype=name)
    assert f"gemm_{name}_2048x2048x4096" in cost.kernel
    table = B200.libraries["trtllm"].products[name]
    assert B200.narrow_peak_flops[name] == table.peak_tflops * 1e12


@pytest.mark.parametrize(
    ("name", "dtype", "scale", "missing"),
    [
        ("a100-80gb", torch.float8_e4m3fn, torch.float32, "fp8"),
        ("h100-80gb", torch.float8_e4m3fn, torch.float8_e8m0fnu, "mxfp8"),
        ("h100-80gb", torch.float4_e2m1fn_x2, torch.float8_e4m3fn, "nvfp4"),
        ("rtx-pro-6000", torch.float8_e4m3fn, torch.float8_e8m0fnu, None),
    ],
)
def test_a_chip_without_scaled_products_refuses_them(
    name: str, dtype: torch.dtype, scale: torch.dtype, missing: str | None
) -> None:
    costs = KernelCosts(load_profile(name))
    a = torch.empty(128, 128, dtype=dtype, device="meta")
    scales = [torch.empty(512, dtype=scale, device="meta")] * 2
    out = torch.empty(128, 128, dtype=torch.bfloat16, device="meta")
    arguments = (torch.ops.aten._scaled_mm.default, (a, a.t(), *scales), {}, out, costs)
    if missing is None:
        assert price(*arguments).duration_ns > 0
        return
    with pytest.raises(RuntimeError, match=f"{name} has no products in {missing} "):
        price(*arguments)


B200_FILE = Path(hardware.__file__).parents[1] / "profiles" / "b200.toml"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('runs_use = ["nccl", "trtllm"]', 'runs_use = ["cutlass"]', "runs_use names 'cutlass', which is no"),
        (
            "ranks = 2",
            "ranks = 1",
            "libraries.nccl.collectives.all_gather[0].ranks = 1: must be from 2",
        ),
        ("[512, ", "[-512, ", "[bytes, us], all positive"),
        (
            "switch_from = 6",
            "switch_from = -6",
            "libraries.nccl.switch_from = -6: must be from 0",
        ),
        ("products.bf16]", "products.bf17]", "products"),
        ("axes = [[64, 256,", "axes = [[256, 64,", "must be positive and rise strictly"),
        ("axes = [[64, 256,", "axes = [[256,", "must be 100 values"),
        ("cache_gain = 1", "cache_gain = 0.1", "libraries.trtllm.products.bf16.cache_gain = 0.1"),
        (
            "operand_bytes = 2",
            "operand_bites = 2",
            "did you mean libraries.trtllm.products.bf16.operand_bytes",
        ),
    ],
)
def test_mistakes_name_the_key(old: str, new: str, message: str) -> None:
    text = B200_FILE.read_text()
    assert old in text
    with pytest.raises(ProfileError) as caught:
        parse_profile(text.replace(old, new, 1), "mine.toml")
    assert message in str(caught.value)
