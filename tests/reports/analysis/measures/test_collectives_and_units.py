"""Collectives by type and by FSDP unit: counts, bytes, bandwidth, exposure, and names of all origins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.model import RankAnalysis
from fsdpbench.reports.analysis.naming import collective_type
from fsdpbench.reports.analysis.units import parse_annotation


def analyzed(built: Any, tmp_path: Path) -> RankAnalysis:
    return analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]


def test_by_type(tmp_path: Path, fsdp_trace: Any) -> None:
    rank = analyzed(fsdp_trace, tmp_path)
    gather = rank.communication["all_gather"]
    assert gather.count == 4
    assert gather.bytes == 4 * 16_000_000
    assert gather.wire_bytes == 4 * 14_000_000
    assert gather.time == 2 * 280_000
    assert gather.exposed == 2 * 130_000
    assert gather.bus_bandwidth == pytest.approx(28_000_000 / 280e-6)
    assert gather.best_bandwidth == pytest.approx(14_000_000 / 90e-6)
    scatter = rank.communication["reduce_scatter"]
    assert (scatter.count, scatter.time, scatter.exposed) == (4, 2 * 160_000, 2 * 80_000)
    assert rank.steps[0].communication["reduce_scatter"].count == 2


def test_full_shard_sends_half_as_much_again_as_all_reduce(tmp_path: Path, trace_builder: Any) -> None:
    sharded, replicated = trace_builder(), trace_builder()
    sharded.collective("all_gather", 1_000_000, 1_100_000, elements=8000)
    sharded.collective("all_gather", 1_100_000, 1_200_000, elements=8000)
    sharded.collective("reduce_scatter", 1_200_000, 1_300_000, elements=8000)
    replicated.collective("all_reduce", 1_000_000, 1_100_000, elements=8000)

    def wire(built: Any) -> int:
        return sum(figures.wire_bytes or 0 for figures in analyzed(built, tmp_path).communication.values())

    assert wire(sharded) == 1.5 * wire(replicated)


def test_by_unit(tmp_path: Path, fsdp_trace: Any) -> None:
    units = {unit.unit: unit for unit in analyzed(fsdp_trace, tmp_path).units}
    assert list(units) == ["blocks.0", "blocks.1"]
    first, second = units["blocks.0"].communication, units["blocks.1"].communication
    assert (first["all_gather"].time, first["all_gather"].exposed) == (2 * 90_000, 2 * 90_000)
    assert (second["all_gather"].time, second["all_gather"].exposed) == (2 * 190_000, 2 * 40_000)
    assert (second["reduce_scatter"].count, second["reduce_scatter"].exposed) == (2, 2 * 45_000)
    assert first["reduce_scatter"].bytes == 2 * 16_000_000


@pytest.mark.parametrize("turned", [False, True])
def test_of_annotations_of_the_same_time_the_hook_is_outside(
    tmp_path: Path, trace_builder: Any, turned: bool
) -> None:
    built = trace_builder()
    names = ["pre_backward (root)", "backward_prefetch for blocks.2", "all_gather (blocks.1)"]
    for name in reversed(names) if turned else names:
        built.annotation(f"FSDP::{name}", 1_000_000, 1_100_000)
    built.collective("all_gather", 1_200_000, 1_300_000, launch=1_050_000, elements=8000)
    gathered = {unit.unit: unit.communication for unit in analyzed(built, tmp_path).units}
    assert gathered["blocks.1"]["all_gather"].count == 1
    assert [unit for unit, kinds in gathered.items() if "all_gather" in kinds] == ["blocks.1"]


def test_the_innermost_annotation_of_the_launching_thread_decides(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.annotation("FSDP::pre_backward (blocks.1)", 1_000_000, 1_100_000)
    built.annotation("FSDP::all_gather (blocks.0)", 1_010_000, 1_020_000)
    built.annotation("FSDP::all_gather (blocks.9)", 1_000_000, 1_100_000, lane=(100, 555))
    built.collective("all_gather", 1_200_000, 1_300_000, launch=1_015_000)
    built.collective("all_gather", 1_300_000, 1_400_000, launch=1_050_000)
    built.collective("all_reduce", 1_400_000, 1_500_000, launch=1_150_000)
    rank = analyzed(built, tmp_path)
    assert {unit.unit: unit.communication["all_gather"].count for unit in rank.units} == {
        "blocks.1": 1,
        "blocks.0": 1,
    }


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("FSDP::all_gather (blocks.0)", ("all_gather", "blocks.0")),
        ("FSDP::post_backward_reduce (layers.3.mlp)", ("post_backward_reduce", "layers.3.mlp")),
        ("FSDP::wait_all_gather (root)", ("wait_all_gather", "root")),
        ("FSDP::all_gather ()", ("all_gather", "root")),
        ("FSDP::backward_prefetch for layers.0", ("backward_prefetch", "layers.0")),
        ("FSDP::root_pre_forward", ("root_pre_forward", "root")),
        ("FSDP::all_gather", ("all_gather", "root")),
        ("FSDP::cast_forward_inputs", None),
        ("forward", None),
        ("FullyShardedDataParallel._pre_forward", None),
    ],
)
def test_annotation_names(name: str, parsed: tuple[str, str] | None) -> None:
    assert parse_annotation(name) == parsed


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "other"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("gloo:reduce_scatter", "reduce_scatter"),
        ("gloo:broadcast", "broadcast"),
        ("void c10d::symmetric_memory::multimem_all_reduce_kernel<float>(float*)", "all_reduce"),
    ],
)
def test_types_by_name(name: str, kind: str) -> None:
    assert collective_type(name) == kind


def test_rccl_calls_all_kernels_alike_and_the_metadata_tells(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    generic = "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)"
    described = {
        "Collective name": "_reduce_scatter_base",
        "In msg nelems": 64,
        "Out msg nelems": 8,
        "dtype": "Float",
        "Group size": 8,
    }
    built.kernel(generic, 1_000_000, 1_010_000, stream=3, **described)
    built.kernel("Cijk_Ailk_Bljk_SB_MT64x64x8", 1_000_000, 1_005_000, stream=0)
    rank = analyzed(built, tmp_path)
    assert rank.communication["reduce_scatter"].bytes == 256
    assert rank.time.overlapped == 5_000


def test_what_stands_in_for_a_reduce_scatter_counts_as_one(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.annotation("FSDP::reduce_scatter (blocks.0)", 990_000, 999_000)
    for name, launch in (
        ("ncclDevKernel_SendRecv(ncclDevComm*)", 995_000),
        ("ncclDevKernel_SendRecv", 999_500),
    ):
        built.kernel(name, launch + 10_000, launch + 12_000, launch=launch, stream=20)
    rank = analyzed(built, tmp_path)
    assert {kind: each.count for kind, each in rank.communication.items()} == {
        "reduce_scatter": 1,
        "send_recv": 1,
    }


def test_spans_of_a_process_groups_threads_find_their_issue(tmp_path: Path, trace_builder: Any) -> None:
    """The reduction was issued second and begins first; one more span was issued before the trace began."""
    built = trace_builder(distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    for unit, event, operator, at in (
        ("blocks.0", "all_gather", "c10d::_allgather_base_", 1_000_000),
        ("blocks.1", "reduce_scatter", "c10d::_reduce_scatter_base_", 1_010_000),
    ):
        built.annotation(f"FSDP::{event} ({unit})", at, at + 5_000)
        built.op(operator, at + 1_000, at + 4_000)
    built.annotation("gloo:all_reduce", 990_000, 1_005_000, lane=(100, 7))
    built.annotation("gloo:all_reduce", 1_020_000, 1_040_000, lane=(100, 7))
    built.annotation("gloo:all_gather", 1_030_000, 1_060_000, lane=(100, 8))
    rank = analyzed(built, tmp_path)
    assert {unit.unit: {k: f.time for k, f in unit.communication.items()} for unit in rank.units} == {
        "blocks.0": {"all_gather": 30_000},
        "blocks.1": {"reduce_scatter": 20_000},
    }
    assert rank.communication["all_reduce"].count == 1


def test_without_sizes_bytes_are_unknown_and_it_is_said(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.collective("all_gather", 1_000_000, 1_100_000, elements=8000)
    built.collective("all_gather", 1_100_000, 1_200_000)
    rank = analyzed(built, tmp_path)
    gather = rank.communication["all_gather"]
    assert (gather.count, gather.bytes, gather.wire_bytes) == (2, None, None)
    assert any("1 of 2 collectives carry no sizes" in warning for warning in rank.warnings)
    assert rank.trusted


def test_collectives_that_run_together_are_not_timed_twice(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.collective("all_gather", 1_000_000, 1_100_000, stream=20)
    built.collective("all_gather", 1_050_000, 1_150_000, stream=21)
    built.collective("reduce_scatter", 1_140_000, 1_160_000, stream=22)
    rank = analyzed(built, tmp_path)
    assert rank.communication["all_gather"].time == 150_000
    assert rank.time.exposed_communication == 160_000
