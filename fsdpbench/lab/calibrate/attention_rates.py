"""Flash attention: rates and overheads of `AttentionProfile` from measured lengths and head sizes.

Measured through `scaled_dot_product_attention`, as models call it, warm and in both directions; so the rates
hold under load, and ``under_load`` is 1 in a calibrated profile.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdpbench.lab.calibrate.machine import Machine
from fsdpbench.lab.calibrate.matrix_products import Fit, fit_section
from fsdpbench.sim.model.kernel_costs import AttentionCost
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import AttentionProfile


@dataclass(frozen=True)
class AttentionShape:
    """Causal attention of ``batch`` sequences of ``length``, ``heads`` of ``head_dim``."""

    batch: int
    heads: int
    length: int
    head_dim: int

    def arguments(self) -> tuple[int, int, int, int, int, bool, str, None]:
        """As `AttentionCost.seconds` takes them."""
        return self.batch, self.heads, self.length, self.length, self.head_dim, True, "bf16", None


SHAPES = tuple(
    AttentionShape(max(1, 16384 // length), heads, length, head_dim)
    for length in (512, 1024, 2048, 4096, 8192)
    for heads, head_dim in ((16, 128), (32, 64))
)
_EXPLAINED = 0.02
"""The mean error of a fit from which on the backward has a traffic of its own."""
# Lowest, highest, scale of a step.
_FITTED = {
    "forward_tflops": (5.0, 5000.0, 50.0),
    "head_dim_64": (0.2, 1.0, 0.1),
    "memory_efficiency": (0.05, 1.0, 0.1),
    "floor_us": (2.0, 100.0, 5.0),  # no kernel is shorter
}


def measure_attention(machine: Machine, profile: HardwareProfile) -> Fit[AttentionProfile]:
    """Measure and fit both directions."""
    times = {shape: _seconds(machine, shape) for shape in SHAPES}
    found = fit_forward(profile, {shape: forward for shape, (forward, _) in times.items()})
    backward = fit_backward(profile, found.section, {shape: seconds for shape, (_, seconds) in times.items()})
    share = _efficient_share(machine)
    return Fit(dataclasses.replace(backward, efficient_share=share), found.mean_error)


def fit_forward(profile: HardwareProfile, seconds: dict[AttentionShape, float]) -> Fit[AttentionProfile]:
    """Return the section that explains the forward's times best."""
    start = dataclasses.replace(profile.attention, under_load=1.0)
    return fit_section(start, lambda section: _errors(profile, section, "forward", seconds), _FITTED)


def fit_backward(
    profile: HardwareProfile, section: AttentionProfile, seconds: dict[AttentionShape, float]
) -> AttentionProfile:
    """Return `section` with the backward's rate, and its traffic where the rate alone explains little."""

    def errors(tried: AttentionProfile) -> list[float]:
        return _errors(profile, tried, "backward", seconds)

    fitted = {"backward_tflops": (5.0, 5000.0, 50.0)}
    found = fit_section(section, errors, fitted)
    if found.mean_error > _EXPLAINED:
        start = dataclasses.replace(section, backward_traffic=section.backward_traffic or 2.5)
        both = fit_section(start, errors, {**fitted, "backward_traffic": (0.5, 20.0, 1.0)})
        found = min(found, both, key=lambda fit: fit.mean_error)
    return found.section


def _errors(
    profile: HardwareProfile, section: AttentionProfile, direction: str, seconds: dict[AttentionShape, float]
) -> list[float]:
    cost = AttentionCost(dataclasses.replace(profile, attention=section))
    return [
        math.log(cost.seconds(direction, *shape.arguments()) / measured)
        for shape, measured in seconds.items()
    ]


def _efficient_share(machine: Machine) -> float:
    """Return the time of the kernel that torch takes by itself over the memory-efficient one's, at most 1."""
    shape = max(SHAPES, key=lambda each: (each.head_dim, each.length))
    own = sum(_seconds(machine, shape))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return min(1.0, own / sum(_seconds(machine, shape)))


def _seconds(machine: Machine, shape: AttentionShape) -> tuple[float, float]:
    """Forward and backward of one shape."""
    query, key, value = (
        machine.normal(shape.batch, shape.heads, shape.length, shape.head_dim).requires_grad_()
        for _ in range(3)
    )

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    with torch.no_grad():
        forward = machine.device_seconds(attend)
    out = attend()
    gradient = torch.randn_like(out)
    inputs = (query, key, value)
    backward = machine.device_seconds(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))
    return forward, backward
