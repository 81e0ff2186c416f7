"""What overlaps with what on the simulated device: the two timelines of FSDP2's documentation.

A model of four modules m1..m4, of which m2 and m3 are units of their own (b and c); the root holds m1 and m4.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_cases import WIDTH, simulated
from timeline_cases import Four, Interval, kernels_of_third_step

from fsdpbench import impl


def run(rows: int, wrap: str, **settings: Any) -> dict[str, Any]:
    """Trace the third step; kernels by label: gathers ``AG m2``, reductions ``RS m2``, ``forward m1``, ..."""
    from torch.distributed.device_mesh import init_device_mesh

    with simulated() as device:
        settings["mesh"] = init_device_mesh("sim", (8,))
        model: Any = Four()
        if wrap == "m2 and m3":
            impl.fully_shard(model.m2, **settings)
            impl.fully_shard(model.m3, **settings)
        impl.fully_shard(model, **settings)
        batch = torch.empty(rows, WIDTH, device=device, requires_grad=True)
        return kernels_of_third_step(model, batch)


def overlap(a: list[Interval], b: list[Interval]) -> float:
    """Microseconds in which an interval of ``a`` and one of ``b`` run together."""
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def share_hidden(found: dict[str, Any], collective: list[Interval], under: list[str]) -> float:
    length = sum(end - start for start, end in collective)
    return sum(overlap(collective, found[name]) for name in under) / length


def case_units_overlap(rank: int, *, forward_prefetch_depth: int, layout: str) -> None:
    found = run(16 * WIDTH, "m2 and m3", forward_prefetch_depth=forward_prefetch_depth, layout=layout)
    packed = layout == "packed"
    gathers_b, gathers_c = found["AG m2"], found["AG m3"]
    assert len(gathers_b) == len(gathers_c) == 2  # once in forward, once in backward
    assert len(found["AG root"]) == 1  # kept from forward to backward
    # b's begins while the root's parameters are being copied, if they are, and is done long before m1 is.
    assert overlap(gathers_b[:1], found["forward m1"]) > 0
    assert gathers_b[0][1] < found["forward m1"][-1][1]
    # c's gather is issued when c's forward starts, but on the CPU, which runs ahead: the device is at m1
    # still. With prefetch it is issued when b's forward starts, and waits for b's copy: the device is at m2.
    under = "forward m2" if forward_prefetch_depth and packed else "forward m1"
    assert share_hidden(found, gathers_c[:1], [under]) > 0.9
    # In backward the CPU is ahead again: c's gather waits only for the memory of its forward's copy.
    assert share_hidden(found, gathers_c[1:], [name for name in found if "ward" in name]) > 0.9
    assert gathers_c[1][1] < found["backward m3"][0][0]
    # b's waits for c's copy, or else only for memory too.
    under_b = ["backward m4", "backward m3"] if packed else [name for name in found if "ward" in name]
    assert share_hidden(found, gathers_b[1:], under_b) > 0.9
    assert gathers_b[1][1] < found["backward m2"][0][0]
    assert share_hidden(found, found["RS m3"], ["backward m2"]) > 0.9
    assert share_hidden(found, found["RS m2"], ["backward m1"]) > 0.9
    # The root's reduction has nothing left to hide under.
    assert share_hidden(found, found["RS root"], [name for name in found if "backward" in name]) < 1e-6


@pytest.mark.parametrize("layout", ["packed", "auto"])
@pytest.mark.parametrize("depth", [0, 1])
def test_units_overlap_as_documented(lone_process, depth: int, layout: str) -> None:
    lone_process.run(case_units_overlap, forward_prefetch_depth=depth, layout=layout)


def case_root_only(rank: int) -> None:
    found = run(16 * WIDTH, "root only")
    computation = [name for name in found if "ward" in name]
    assert len(found["AG root"]) == len(found["RS root"]) == 1
    assert share_hidden(found, found["AG root"], computation) < 1e-6
    assert share_hidden(found, found["RS root"], computation) < 1e-6


def test_root_only_overlaps_nothing(lone_process) -> None:
    lone_process.run(case_root_only)


def case_queueing(rank: int) -> None:
    """Without prefetch the gather of b waits for the reduction of c in their one communicator."""
    dear = WIDTH // 8  # little computation, so that communication is what counts
    without = run(dear, "m2 and m3", backward_prefetch=None)
    ahead = run(dear, "m2 and m3")
    reduced = without["RS m3"][0][1]
    assert without["AG m2"][1][0] >= reduced
    assert ahead["AG m2"][1][0] < ahead["RS m3"][0][0]


def test_without_prefetch_gathers_queue_behind_reductions(lone_process) -> None:
    lone_process.run(case_queueing)
