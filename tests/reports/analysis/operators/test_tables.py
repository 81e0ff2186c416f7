"""Kernels, operators, modules and devices of a trace whose truth is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import RankAnalysis, analyze
from fsdpbench.reports.analysis.peaks import ANY_DEVICE, Chip

US = 1000
CHIP = Chip("a chip", {"bf16": 1e12, "fp32": 1e11}, 1e11)
SHAPES = {"Input Dims": [[100, 200], [200, 50]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}


def at(us: float) -> int:
    return 1_000_000 + int(us * US)


def analyzed(built: Any, tmp_path: Path, chip: Chip | None = CHIP) -> RankAnalysis:
    path = built.write(tmp_path / "rank0_trace.json")
    return analyze([path], chips={ANY_DEVICE: chip} if chip else None).ranks[0]


def product(built: Any, start: float, us: float, **more: Any) -> None:
    """A product of 2 MFLOP and 70 kB: its kernel, and a second one that adds up its parts."""
    built.op("aten::mm", at(start), at(start + 10), **{**SHAPES, **more})
    built.kernel("gemm_bf16", at(start + 20), at(start + 20 + us), launch=at(start + 1))
    built.kernel("splitKreduce", at(start + 20 + us), at(start + 21 + us), launch=at(start + 5))


def test_kernels_by_time_with_what_they_reach(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, at(0), at(400))
    product(built, 10, 10)
    product(built, 60, 30)
    built.kernel("elementwise_kernel", at(300), at(350), launch=at(200))
    built.kernel("of another step", at(500), at(900), launch=at(450))
    tables = analyzed(built, tmp_path).tables
    rows = {each.name: each for each in tables.kernels}
    assert [(each.name, each.count, each.time) for each in tables.kernels] == [
        ("elementwise_kernel", 1, 50 * US),
        ("gemm_bf16", 2, 40 * US),
        ("splitKreduce", 2, 2 * US),
    ]
    assert sum(each.share for each in tables.kernels) == pytest.approx(1)
    assert rows["gemm_bf16"].family == "matrix product"
    # 4 MFLOP in 40 us; at 1 TFLOP/s they take 4.
    told = rows["gemm_bf16"].to_dict()
    assert told["tflops"] == pytest.approx(0.1)
    assert told["roof_share"] == pytest.approx(0.1)
    assert rows["splitKreduce"].to_dict()["tflops"] is None
    (operator,) = tables.operators
    assert (operator.count, operator.time, operator.flops) == (2, 42 * US, 2_000_000)
    assert operator.bound == "compute"
    assert operator.shapes == "100x200, 200x50"


def test_bound_by_memory_and_without_a_roof(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.op("aten::add", at(0), at(10), **{"Input Dims": [[1000], [1000]], "Input type": ["float", "float"]})
    built.kernel("add_kernel", at(20), at(21), launch=at(1))
    built.op("aten::copy_", at(30), at(40), **{"Input Dims": [[1000], [1000]], "Input type": ["float"] * 2})
    built.kernel("Memcpy HtoD (Pageable -> Device)", at(50), at(60), launch=at(31), category="gpu_memcpy")
    add, copy = sorted(analyzed(built, tmp_path).tables.operators, key=lambda each: each.name)
    # 12 kB in 1 us, and 0.12 us at 100 GB/s.
    assert (add.bound, add.rate.to_dict()["roof_share"]) == ("memory", pytest.approx(0.12))
    assert copy.bound is None
    assert copy.rate.to_dict()["roof_share"] is None
    assert all(each.bound is None for each in analyzed(built, tmp_path, None).tables.operators)


def test_modules_own_what_their_forward_launches(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()

    def module(name: str, start: float, end: float) -> None:
        built.event("python_function", f"nn.Module: {name}", at(start), int((end - start) * US))

    built.event("python_function", "train.py(3): step", at(0), 900 * US)
    module("GPT_0", 0, 100)
    for number in range(2):
        module(f"Block_{number}", 10 + 40 * number, 40 + 40 * number)
        module(f"Linear_{number}", 20 + 40 * number, 30 + 40 * number)
        built.kernel("gemm", at(200 + 50 * number), at(220 + 50 * number), launch=at(25 + 40 * number))
        built.kernel("add", at(230 + 50 * number), at(235 + 50 * number), launch=at(35 + 40 * number))
    built.kernel("backward", at(400), at(450), launch=at(300))
    modules = {each.name: each for each in analyzed(built, tmp_path).tables.modules}
    assert {name: (each.instances, each.calls, each.own, each.time) for name, each in modules.items()} == {
        "GPT": (1, 1, 0, 50 * US),
        "Block": (2, 2, 10 * US, 50 * US),
        "Linear": (2, 2, 40 * US, 40 * US),
    }
    assert modules["GPT"].share == pytest.approx(0.5)


def test_each_device_of_several_has_its_own_idle_time(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.kernel("gemm", at(0), at(100), device=0)
    built.kernel("gemm", at(0), at(30), device=1, stream=8)
    first, second = analyzed(built, tmp_path).tables.devices
    assert (first.to_dict()["idle_s"], second.to_dict()["idle_s"]) == (0.0, pytest.approx(70e-6))


def test_operators_on_a_cpu_without_those_inside_them(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.op("aten::linear", at(0), at(100))
    built.op("aten::addmm", at(10), at(90))
    tables = analyzed(built, tmp_path).tables
    assert [(each.name, each.time) for each in tables.kernels] == [
        ("aten::addmm", 80 * US),
        ("aten::linear", 20 * US),
    ]
