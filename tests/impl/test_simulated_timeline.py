"""What overlaps with what on the simulated device: the two timelines of FSDP2's documentation.

A model of four modules m1..m4, of which m2 and m3 are units of their own (b and c); the root holds m1 and m4.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_simulated_memory import simulated
from torch import nn

from fsdpbench import impl

WIDTH = 4096
Interval = tuple[float, float]


class Named(nn.Module):
    """A layer whose forward and backward kernels can be told from others by their labels."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device="sim")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function(f"forward {self.name}"):
            return Mark.apply(self.linear(Mark.apply(x, self.name, False)), self.name, True)


class Mark(torch.autograd.Function):
    """Opens and closes a label around a module's part of backward."""

    open: dict[str, Any] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, at_output: bool) -> torch.Tensor:
        ctx.name, ctx.at_output = name, at_output
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if ctx.at_output:
            label = torch.profiler.record_function(f"backward {ctx.name}")
            label.__enter__()
            Mark.open[ctx.name] = label
        else:
            Mark.open.pop(ctx.name).__exit__(None, None, None)
        return gradient, None, None


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("m1", "m2", "m3", "m4"):
            self.add_module(name, Named(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


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


def kernels_of_third_step(model: Any, batch: torch.Tensor) -> dict[str, Any]:
    """Kernels by label, inside a simulation of 8 GPUs."""
    from fsdpbench.sim import Simulation, load_profile

    simulation = Simulation(load_profile("a100-80gb"), 8, 8, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0_trace.json.gz"
        for _ in range(2):
            model(batch).sum().backward()
            model.zero_grad()
        with simulation.trace(path) as trace:
            model(batch).sum().backward()
            simulation.synchronize()
            trace.step()
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return kernels_by_label(events)


def kernels_by_label(events: list[dict[str, Any]]) -> dict[str, Any]:
    """From each label to the interval of its kernels (collectives, or computation)."""
    complete = [event for event in events if event.get("ph") == "X"]
    labels = [e for e in complete if e["cat"] == "user_annotation" and not e["name"].startswith("Profiler")]
    launches = {e["args"]["correlation"]: e for e in complete if e["cat"] == "cuda_runtime" and "args" in e}
    found: dict[str, list[Interval]] = {}
    for kernel in complete:
        if kernel["cat"] != "kernel":
            continue
        launch = launches[kernel["args"]["correlation"]]
        inside = [
            e
            for e in labels
            if e["ts"] <= launch["ts"] and launch["ts"] + launch["dur"] <= e["ts"] + e["dur"]
        ]
        if not inside:
            continue
        collective = "nccl" in kernel["name"]
        for event in inside:
            name = event["name"]
            if name.startswith("FSDP::"):
                kind, unit = name.removeprefix("FSDP::").rstrip(")").split(" (")
                name = {"all_gather": "AG", "reduce_scatter": "RS"}.get(kind, "") + f" {unit}"
                wanted = collective and name[0] != " "
            else:
                wanted = not collective and not any(e["name"].startswith("FSDP::") for e in inside)
            if wanted:
                found.setdefault(name, []).append((kernel["ts"], kernel["ts"] + kernel["dur"]))
    return found


def overlap(a: list[Interval], b: list[Interval]) -> float:
    """Microseconds in which an interval of ``a`` and one of ``b`` run together."""
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def share_hidden(found: dict[str, Any], collective: list[Interval], under: list[str]) -> float:
    length = sum(end - start for start, end in collective)
    return sum(overlap(collective, found[name]) for name in under) / length


def case_units_overlap(rank: int, *, forward_prefetch_depth: int) -> None:
    found = run(16 * WIDTH, "m2 and m3", forward_prefetch_depth=forward_prefetch_depth)
    gathers_b, gathers_c = found["AG m2"], found["AG m3"]
    assert len(gathers_b) == len(gathers_c) == 2  # once in forward, once in backward
    assert len(found["AG root"]) == 1  # kept from forward to backward
    # b's begins while the root's parameters are being copied, and is done long before m1 is.
    assert overlap(gathers_b[:1], found["forward m1"]) > 0
    assert gathers_b[0][1] < found["forward m1"][-1][1]
    # c's gather is issued when c's forward starts, but on the CPU, which runs ahead: the device is at m1
    # still. # With prefetch it is issued when b's forward starts, and waits for b's copy: the device is at
    # m2.
    under = "forward m2" if forward_prefetch_depth else "forward m1"
    assert share_hidden(found, gathers_c[:1], [under]) > 0.9
    # In backward the CPU is ahead again: c's gather waits only for the memory of its forward's copy.
    assert share_hidden(found, gathers_c[1:], [name for name in found if "ward" in name]) > 0.9
    assert gathers_c[1][1] < found["backward m3"][0][0]
    assert share_hidden(found, gathers_b[1:], ["backward m4", "backward m3"]) > 0.9
    assert share_hidden(found, found["RS m3"], ["backward m2"]) > 0.9
    assert share_hidden(found, found["RS m2"], ["backward m1"]) > 0.9
    # The root's reduction has nothing left to hide under.
    assert share_hidden(found, found["RS root"], [name for name in found if "backward" in name]) == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_units_overlap_as_documented(lone_process, depth: int) -> None:
    lone_process.run(case_units_overlap, forward_prefetch_depth=depth)


def case_root_only(rank: int) -> None:
    found = run(16 * WIDTH, "root only")
    computation = [name for name in found if "ward" in name]
    assert len(found["AG root"]) == len(found["RS root"]) == 1
    assert share_hidden(found, found["AG root"], computation) == 0
    assert share_hidden(found, found["RS root"], computation) == 0


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
