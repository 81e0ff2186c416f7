"""Four named modules, and the kernels of one of their steps by label; runs in a process of its own."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from simulated_cases import WIDTH
from torch import nn

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
