"""Work of a device that is not known here is said, never passed over as trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze

US = 1000


def at(us: float) -> int:
    return 1_000_000 + int(us * US)


@pytest.mark.parametrize(
    "category", ["mtia_ccp_events", "mtia_runtime", "hpu_op", "npu_kernel", "glow_runtime"]
)
def test_an_accelerator_that_is_not_known(category: str, tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.op("aten::mm", at(0), at(100))
    built.event(category, "work", at(10), 50 * US)
    (rank,) = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks
    assert not rank.trusted
    assert f"'{category}' (1)" in rank.warnings[0]
    assert rank.verdict is not None
    assert rank.verdict.sentence.startswith("Cannot tell, because the trace holds work of an accelerator")


def test_an_unknown_category_beside_kernels_is_a_remark(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.op("aten::mm", at(0), at(100))
    built.event("something_new", "work", at(10), 50 * US)
    (alone,) = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks
    built.kernel("gemm", at(100), at(200), launch=at(1))
    (beside,) = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks
    assert (alone.trusted, beside.trusted) == (False, True)
    assert any("'something_new' (1)" in warning for warning in beside.warnings)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void c10d::(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(x*)", "all_reduce"),
        ("multimem_all_gather_kernel", "all_gather"),
        ("void two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)", "all_reduce"),
        ("nvshmemi_fcollect_kernel", "all_gather"),
        ("void nvshmemi_barrier_all_kernel", "barrier"),
        ("nvshmemx_float_put_block", "send_recv"),
        ("all_to_all_vdev_2d", "all_to_all"),
        ("void deep_ep::intranode::dispatch<2>(int4*)", "all_to_all"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(x)", "all_reduce"),
        ("ncclSymkDevKernel_ReduceScatter_LDMC(x)", "reduce_scatter"),
        ("rcclGenericKernel(x)", "other"),
        ("void at::native::reduce_kernel<512, 1, float>(x)", None),
        ("void at::native::vectorized_gather_kernel<16, long>(x)", None),
        ("gatherTopK", None),
    ],
)
def test_whose_collectives(name: str, kind: str | None, tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.kernel(name, at(0), at(50))
    built.kernel("gemm", at(60), at(90))
    (rank,) = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks
    assert {name: each.count for name, each in rank.communication.items()} == ({kind: 1} if kind else {})


def test_idle_is_named_when_it_is_the_largest_share(tmp_path: Path, trace_builder: Any) -> None:
    """Without a CPU in the trace nobody can say why, but that it idles is what there is to say."""
    built = trace_builder()
    for start in (0, 100):
        built.kernel("gemm", at(start), at(start + 18))
    built.kernel("gemm", at(199), at(200))
    built.events = [event for event in built.events if event["cat"] == "kernel"]
    (rank,) = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks
    assert rank.verdict is not None
    assert rank.verdict.sentence.startswith("82 % of the time the GPU is idle, CPU not seen")
