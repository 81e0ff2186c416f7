"""FLOPs from the shapes in a real trace are those that torch counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.operators import cost_of
from fsdpbench.reports.readers import OperatorCall, read_trace


def program() -> None:
    """Products, a batched product and strided convolutions, forward and backward; of a grouped one torch
    counts the weight's gradient as of an ungrouped one, so that one has no backward."""
    left = torch.ones(24, 32, requires_grad=True)
    (left @ torch.ones(32, 8, requires_grad=True)).sum().backward()
    functional.linear(left, torch.ones(16, 32), torch.ones(16)).sum().backward()
    torch.baddbmm(torch.ones(3, 4, 6), torch.ones(3, 4, 5), torch.ones(3, 5, 6))
    image, weight = torch.ones(2, 4, 9, 11, requires_grad=True), torch.ones(6, 4, 3, 3, requires_grad=True)
    functional.conv2d(image, weight, stride=2, padding=1).sum().backward()
    functional.conv2d(image.detach(), torch.ones(6, 2, 3, 3), stride=2, padding=1, groups=2)


@pytest.mark.campaign
def test_the_flops_of_a_real_trace_are_those_that_torch_counts(tmp_path: Path) -> None:
    with FlopCounterMode(display=False) as counter:
        program()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        program()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    counted = sum(cost_of(trace.name_of(row), call).flops or 0 for row, call in trace.calls.by_row().items())
    assert counted == counter.get_total_flops()
    (rank,) = analyze([path]).ranks
    told = rank.to_dict()
    assert sum(each["count"] * (each["flops"] or 0) for each in told["operators"]) == counted
    assert sum(each["time_s"] for each in told["kernels"]) == pytest.approx(told["kernel_time_s"])
    assert told["roof"] is None


def test_scaled_products_of_a_real_trace_are_counted(tmp_path: Path) -> None:
    """Both of torch's operators, by the names and values that the profiler has for them."""
    a, one = torch.ones(32, 64).to(torch.float8_e4m3fn), torch.ones(())
    kind = [functional.ScalingType.TensorWise]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)
        functional.scaled_mm(a, a.t(), [one], kind, [one], kind, output_dtype=torch.bfloat16)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    named = [(trace.name_of(row), each) for row, each in trace.calls.by_row().items()]
    found = {name: cost_of(name, each) for name, each in named if "scaled" in name}
    assert list(found) == ["aten::_scaled_mm", "aten::_scaled_mm_v2"]
    for cost in found.values():
        assert (cost.flops, cost.bytes) == (2 * 32 * 64 * 32, 2 * 32 * 64 + 2 * 32 * 32)


def call(
    *sizes: tuple[int, ...], kind: str = "c10::BFloat16", values: dict[int, str] | None = None
) -> OperatorCall:
    texts = [""] * max(len(sizes), 16)
    for place, text in (values or {}).items():
        texts[place] = text
    return OperatorCall(sizes, (kind,) * len(sizes), tuple(texts))


QKV = (2, 8, 128, 64)
FP8, FP4 = "c10::Float8_e4m3fn", "c10::Float4_e2m1fn_x2"


@pytest.mark.parametrize(
    ("name", "made", "flops", "moved"),
    [
        ("aten::mm", call((4, 8), (8, 2)), 2 * 4 * 8 * 2, 2 * (32 + 16 + 8)),
        ("aten::mm", call((4, 8), (9, 2)), None, None),
        ("aten::mm", call((4, 8)), None, None),
        ("aten::mm", call((4, 8), (8, 2), kind="unheard of"), 128, None),
        ("aten::_scaled_mm", call((4, 8), (8, 2), kind=FP8, values={6: "15"}), 128, 32 + 16 + 2 * 8),
        ("aten::_scaled_mm", call((4, 8), (8, 2), kind=FP8), 128, 32 + 16 + 8),
        ("aten::_scaled_mm_v2", call((4, 8), (8, 2), kind=FP8, values={9: "6"}), 128, 32 + 16 + 4 * 8),
        ("aten::_scaled_mm_v2", call((4, 8), (8, 2), kind=FP4, values={9: "15"}), 256, 32 + 16 + 2 * 8),
        (
            "aten::_scaled_dot_product_flash_attention",
            call(QKV, QKV, QKV, values={4: "False"}),
            4 * 2 * 8 * 128 * 128 * 64,
            2 * 4 * 2 * 8 * 128 * 64,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            call(QKV, QKV, QKV, values={4: "True"}),
            2 * 2 * 8 * 128 * 128 * 64,
            2 * 4 * 2 * 8 * 128 * 64,
        ),
        ("aten::_scaled_dot_product_flash_attention", call(QKV, QKV, QKV), None, None),
        ("aten::add", call((5, 6), (6,)), None, 2 * (30 + 6 + 30)),
        ("aten::zero_", call((5, 6)), None, 2 * 30),
        ("aten::convolution", call((1, 2, 3, 3), (1, 2, 9, 9), values={3: "[1, 1]"}), None, None),
    ],
)
def test_what_a_call_costs(name: str, made: OperatorCall, flops: int | None, moved: int | None) -> None:
    cost = cost_of(name, made)
    assert (cost.flops, cost.bytes) == (flops, moved)
