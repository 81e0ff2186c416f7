"""Kernels, copies and limiter waits are counted within the annotated steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.tables import NameTotal, fused_groups, moves_only
from fsdpbench.reports.figures import computed


def test_counts_of_a_mean_step(tmp_path: Path, fsdp_trace: Any) -> None:
    start = 2_000_000  # the second step of two
    fsdp_trace.annotation("FSDP::limiter_wait (blocks.1)", start + 15_000, start + 16_000)
    fsdp_trace.kernel(
        "void direct_copy_kernel_cuda", start + 960_000, start + 970_000, launch=start + 520_000
    )
    for name in ("triton_poi_fused__to_copy_add_0", "triton_poi_fused__to_copy_1"):
        fsdp_trace.kernel(name, start + 970_000, start + 975_000, launch=start + 530_000)
    fsdp_trace.kernel("a kernel before all steps", 500_000, 600_000, launch=400_000)
    analysis = analyze([fsdp_trace.write(tmp_path / "rank0_trace.json.gz")])
    (rank,) = analysis.ranks
    assert rank.work.to_dict() == {"kernels": 13, "copies": 2, "limiter_waits": 1}
    figures = computed([], analysis)
    assert figures["work"] == {"kernels": 6.5, "copies": 1, "limiter_waits": 0.5}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton_poi_fused__to_copy_3", True),
        ("triton_poi_fused__to_copy_clone_transpose_view_12", True),
        ("triton_poi_fused__unsafe_view_cat_0", True),
        ("triton_poi_fused__to_copy_add_mul_3", False),
        ("triton_red_fused__to_copy_native_layer_norm_backward_1", False),
        ("triton_poi_fused_copysign_0", False),
        ("triton_poi_fused_0", False),
        ("graph_0_cpp_fused__to_copy_0", True),
        ("void direct_copy_kernel_cuda", None),
    ],
)
def test_a_fused_kernel_is_a_copy_if_it_computes_nothing(name: str, expected: bool | None) -> None:
    assert moves_only(name) is expected


def test_fused_kernels_are_grouped_by_what_they_were_made_of() -> None:
    ran = [
        NameTotal("triton_poi_fused__to_copy_mul_silu_1", 4, 400),
        NameTotal("triton_poi_fused__to_copy_mul_silu_0", 2, 100),
        NameTotal("triton_per_fused__fused_rms_norm_0", 2, 700),
        NameTotal("gemm_bf16", 2, 9000),
    ]
    first, second = fused_groups(ran)
    assert first.to_dict() == {
        "kind": "reduction of whole rows", "operators": "fused_rms_norm", "kernels": 1, "count": 2,
        "time_s": 7e-07,
    }  # fmt: skip
    assert (second.kind, second.operators) == ("pointwise", "to_copy_mul_silu")
    assert (second.kernels, second.count, second.time) == (2, 6, 500)
