"""Matrix products: the efficiency figures of `GemmProfile` from measured shapes.

The forward shapes are fitted by least squares on the logarithm, so that a small product counts as much as a
large one. Weight gradients (first factor stored transposed) then give one factor, and a product repeated for
seconds, until the chip is warm and its power limit holds, gives ``under_load``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from scipy.optimize import least_squares

from fsdpbench.lab.calibrate.machine import Machine
from fsdpbench.sim.model.kernel_costs import GemmCost
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import GemmProfile

Shape = tuple[int, int, int]

_ROWS = (64, 512, 2048, 4096, 16384)
_SIDES = ((1024, 4096), (4096, 1024), (4096, 4096), (5120, 13824), (8192, 2048), (2560, 10240))
FORWARD_SHAPES: tuple[Shape, ...] = tuple((m, n, k) for m in _ROWS for n, k in _SIDES)
WEIGHT_SHAPES: tuple[Shape, ...] = ((2560, 10240, 8192), (4096, 4096, 16384), (8192, 2048, 4096))
_LOAD_SHAPE: Shape = (8192, 8192, 8192)
# Lowest, highest, scale of a step.
_FITTED = {
    "sustained": (0.05, 1.0, 0.1),
    "memory_efficiency": (0.05, 1.0, 0.1),
    "prologue_k": (0.0, 1000.0, 20.0),
    "wave_quantisation": (0.0, 1.0, 0.1),
    "floor_us": (0.1, 50.0, 1.0),
}
Section = TypeVar("Section")


@dataclass(frozen=True)
class Fit(Generic[Section]):
    """A fitted section, and how far it is from what was measured (mean share)."""

    section: Section
    mean_error: float


def fit_section(
    start: Section,
    errors_of: Callable[[Section], list[float]],
    fitted: Mapping[str, tuple[float, float, float]],
) -> Fit[Section]:
    """Return `start` with the figures of `fitted` (lowest, highest, scale of a step) that explain best what
    was measured. `errors_of`: logarithms of modelled over measured."""
    lowest, highest, scale = zip(*fitted.values(), strict=True)

    def section(values: Iterable[float]) -> Section:
        return dataclasses.replace(start, **dict(zip(fitted, map(float, values), strict=True)))  # type: ignore[type-var]

    guess = [
        min(max(getattr(start, name), low * 1.01 + 1e-6), high * 0.99)
        for name, (low, high, _) in fitted.items()
    ]
    found = least_squares(
        lambda values: errors_of(section(values)), guess, bounds=(lowest, highest), x_scale=scale
    ).x
    left = errors_of(section(found))
    return Fit(section(found), statistics.fmean(abs(math.expm1(error)) for error in left))


def measure_gemm(machine: Machine, profile: HardwareProfile, load_seconds: float) -> Fit[GemmProfile]:
    """Measure and fit bf16 products; what is not measured (the tiles) comes from ``profile``."""
    forward = {shape: _forward_seconds(machine, shape) for shape in FORWARD_SHAPES}
    found = fit_gemm(profile, forward)
    with_forward = dataclasses.replace(profile, gemm=found.section)
    ratios = [
        GemmCost(with_forward).seconds(*shape, 1, "bf16", "forward") / _weight_seconds(machine, shape)
        for shape in WEIGHT_SHAPES
    ]
    section = dataclasses.replace(
        found.section,
        weight_grad=min(1.0, statistics.median(ratios)),
        under_load=_under_load(machine, load_seconds),
    )
    return Fit(section, found.mean_error)


def fit_gemm(profile: HardwareProfile, seconds: dict[Shape, float]) -> Fit[GemmProfile]:
    """Return the section of a profile that explains measured products best."""

    def errors(section: GemmProfile) -> list[float]:
        cost = GemmCost(dataclasses.replace(profile, gemm=section))
        return [
            math.log(cost.seconds(*shape, 1, "bf16", "forward") / measured)
            for shape, measured in seconds.items()
        ]

    start = dataclasses.replace(profile.gemm, under_load=1.0, weight_grad=1.0)
    return fit_section(start, errors, _FITTED)


def _forward_seconds(machine: Machine, shape: Shape) -> float:
    m, n, k = shape
    a, b = machine.normal(m, k), machine.normal(n, k)
    return machine.device_seconds(lambda: torch.nn.functional.linear(a, b))


def _weight_seconds(machine: Machine, shape: Shape) -> float:
    """The gradient of a weight ``(m, n)`` over ``k`` tokens."""
    m, n, k = shape
    gradient, inputs = machine.normal(k, m), machine.normal(k, n)
    return machine.device_seconds(lambda: gradient.t() @ inputs)


def _under_load(machine: Machine, load_seconds: float) -> float:
    """Speed of a product after running it for a while, against a cool start; at most 1."""
    m, n, k = _LOAD_SHAPE
    a, b = machine.normal(m, k), machine.normal(n, k)

    def product() -> object:
        return torch.nn.functional.linear(a, b)

    cool = machine.device_seconds(product)
    started = machine.host_ns()
    while (machine.host_ns() - started) / 1e9 < load_seconds:
        machine.device_seconds(product, repeats=50)
    return min(1.0, cool / machine.device_seconds(product))
