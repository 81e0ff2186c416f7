"""Kernel rates: fits the figures of `GemmProfile`, `AttentionProfile` and `BandwidthProfile` to measurements.

Forward matrix products are fitted by least squares on the logarithm of their times, so that small and large
ones count equally. Weight gradients (first factor stored transposed) give one more factor. A product that is
repeated for seconds, until the chip is warm and power-limited, gives ``under_load``.

Flash attention is measured through `scaled_dot_product_attention`, as models call it, warm and in both
directions. So its rates already hold under load, and its ``under_load`` is 1 in a calibrated profile.

Memory-bound kernels have a share of the peak bandwidth for each kind of operator. Each kind is measured on
operators that are frequent in training steps, with their usual dtypes; bytes are counted as in the
simulator. The kind's share is the median over its operators.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from scipy.optimize import least_squares
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.torch_internals import TorchDispatchMode, fused_adamw_
from fsdpbench.lab.calibrate.machine import Machine
from fsdpbench.sim.model.kernel_costs import AttentionCost, GemmCost, KernelCosts
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import AttentionProfile, BandwidthProfile, GemmProfile
from fsdpbench.sim.torch_device.prices import price

Shape = tuple[int, int, int]

_ROWS = (64, 512, 2048, 4096, 16384)
_SIDES = ((1024, 4096), (4096, 1024), (4096, 4096), (5120, 13824), (8192, 2048), (2560, 10240))
FORWARD_SHAPES: tuple[Shape, ...] = tuple((m, n, k) for m in _ROWS for n, k in _SIDES)
WEIGHT_SHAPES: tuple[Shape, ...] = ((2560, 10240, 8192), (4096, 4096, 16384), (8192, 2048, 4096))
_LOAD_SHAPE: Shape = (8192, 8192, 8192)
_FITTED, _FITTED_ATTENTION = table_beside(__file__, "kernel_rates.toml").values()
Section = TypeVar("Section")


@dataclass(frozen=True)
class Fit(Generic[Section]):
    """A fitted section, and its mean relative error."""

    section: Section
    mean_error: float


def fit_section(
    start: Section,
    errors_of: Callable[[Section], list[float]],
    fitted: Mapping[str, tuple[float, float, float]],
) -> Fit[Section]:
    """Return `start` with the figures in `fitted` (lowest, highest, scale of a step) that fit the
    measurements best. `errors_of`: logarithms of modelled over measured times."""
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
    """Measure and fit bf16 products; figures that are not measured (the tiles) come from ``profile``."""
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
    """Return the section that fits the measured products best."""

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
    """Return the time of the gradient of a weight ``(m, n)`` over ``k`` tokens."""
    m, n, k = shape
    gradient, inputs = machine.normal(k, m), machine.normal(k, n)
    return machine.device_seconds(lambda: gradient.t() @ inputs)


def _under_load(machine: Machine, load_seconds: float) -> float:
    """Return the speed of a product after running it for a while, relative to a cool start; at most 1."""
    m, n, k = _LOAD_SHAPE
    a, b = machine.normal(m, k), machine.normal(n, k)

    def product() -> object:
        return torch.nn.functional.linear(a, b)

    cool = machine.device_seconds(product)
    started = machine.host_ns()
    while (machine.host_ns() - started) / 1e9 < load_seconds:
        machine.device_seconds(product, repeats=50)
    return min(1.0, cool / machine.device_seconds(product))


@dataclass(frozen=True)
class AttentionShape:
    """Causal attention of ``batch`` sequences of ``length``, ``heads`` of ``head_dim``."""

    batch: int
    heads: int
    length: int
    head_dim: int

    def arguments(self) -> tuple[int, int, int, int, int, bool, str, None]:
        """Return the arguments of `AttentionCost.seconds`."""
        return self.batch, self.heads, self.length, self.length, self.head_dim, True, "bf16", None


SHAPES = tuple(
    AttentionShape(max(1, 16384 // length), heads, length, head_dim)
    for length in (512, 1024, 2048, 4096, 8192)
    for heads, head_dim in ((16, 128), (32, 64))
)
_EXPLAINED = 0.02
"""If the mean error of a fit exceeds this, the backward also gets a traffic figure."""


def measure_attention(machine: Machine, profile: HardwareProfile) -> Fit[AttentionProfile]:
    """Measure and fit attention forward and backward."""
    times = {shape: _seconds(machine, shape) for shape in SHAPES}
    found = fit_forward(profile, {shape: forward for shape, (forward, _) in times.items()})
    backward = fit_backward(profile, found.section, {shape: seconds for shape, (_, seconds) in times.items()})
    share = _efficient_share(machine)
    return Fit(dataclasses.replace(backward, efficient_share=share), found.mean_error)


def fit_forward(profile: HardwareProfile, seconds: dict[AttentionShape, float]) -> Fit[AttentionProfile]:
    """Return the section that fits the forward's times best."""
    start = dataclasses.replace(profile.attention, under_load=1.0)
    return fit_section(
        start, lambda section: _errors(profile, section, "forward", seconds), _FITTED_ATTENTION
    )


def fit_backward(
    profile: HardwareProfile, section: AttentionProfile, seconds: dict[AttentionShape, float]
) -> AttentionProfile:
    """Return `section` with the backward's rate, and its traffic if the rate alone does not fit."""

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
    """Return the time of torch's default kernel over that of the memory-efficient one, at most 1."""
    shape = max(SHAPES, key=lambda each: (each.head_dim, each.length))
    own = sum(_seconds(machine, shape))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return min(1.0, own / sum(_seconds(machine, shape)))


def _seconds(machine: Machine, shape: AttentionShape) -> tuple[float, float]:
    """Return the seconds of forward and backward for one shape."""
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


Work = Callable[[torch.device], Callable[[], object]]
_WARMED_ROWS, _WIDTH = 16384, 4096
_VOCABULARY = 50304
_SWEPT = 1 << 28
_BEST_SHARE = 0.93


def measure_bandwidth(machine: Machine, profile: HardwareProfile) -> BandwidthProfile:
    """Measure the share of the peak bandwidth for each kind, and the smallest kernel's time."""
    tiny = machine.normal(16)
    floor = machine.device_seconds(lambda: tiny.add_(1), repeats=50)
    efficiency = dict(profile.bandwidth.efficiency)
    for kind, works in _WORKS.items():
        shares = [_share(machine, profile, work, floor) for work in works]
        efficiency[kind] = min(1.0, statistics.median(shares))
    return dataclasses.replace(
        profile.bandwidth, efficiency=MappingProxyType(efficiency), floor_us=floor * 1e6
    )


def peak_bandwidth(machine: Machine, profile: HardwareProfile) -> float:
    """Return the memory's peak bandwidth in GB/s: the base's, unless a measured sweep comes too close to it.

    No kernel reaches the figure of a data sheet. If one seems to, the memory is not that of the base.
    """
    whole = machine.normal(_SWEPT)
    reached = 2 * _SWEPT / machine.device_seconds(lambda: whole.mul_(2)) / 1e9 * whole.element_size()
    if reached <= _BEST_SHARE * profile.memory.bandwidth_gb_s:
        return profile.memory.bandwidth_gb_s
    return reached / _BEST_SHARE


def _share(machine: Machine, profile: HardwareProfile, work: Work, floor: float) -> float:
    seconds = machine.device_seconds(work(machine.device))
    ideal = bytes_moved(work, profile) / profile.memory_bandwidth
    return ideal / max(seconds - floor, 1e-9)


def _tensor(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _call(
    operator: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> Work:
    """Return a `Work` that calls `operator` with zeros of these shapes."""

    def prepare(device: torch.device) -> Callable[[], object]:
        return partial(operator, *(_tensor(device, *shape, dtype=dtype) for shape in shapes))

    return prepare


def _layer_norm_backward(device: torch.device) -> Callable[[], object]:
    x, weight = _tensor(device, _WARMED_ROWS, _WIDTH), _tensor(device, _WIDTH)
    gradient = _tensor(device, _WARMED_ROWS, _WIDTH)
    mean, rstd = (_tensor(device, _WARMED_ROWS, 1, dtype=torch.float32) for _ in range(2))
    return lambda: torch.ops.aten.native_layer_norm_backward(
        gradient, x, (_WIDTH,), mean, rstd, weight, None, [True, True, False]
    )


def _adamw(device: torch.device) -> Callable[[], object]:
    lists = [[_tensor(device, _WARMED_ROWS, _WIDTH, dtype=torch.float32)] for _ in range(4)]
    steps = [torch.ones((), device=device)]
    update: Callable[..., object] = fused_adamw_
    options = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    return lambda: update(*lists, [], steps, amsgrad=False, maximize=False, **options)


def _embedding(device: torch.device) -> Callable[[], object]:
    table = _tensor(device, _VOCABULARY, _WIDTH)
    tokens = torch.zeros(_WARMED_ROWS, dtype=torch.int64, device=device)
    if device.type == "cuda":
        tokens.random_(0, _VOCABULARY)
    return lambda: F.embedding(tokens, table)


_ROW, _WIDE = (_WARMED_ROWS, _WIDTH), (_WARMED_ROWS, 4 * _WIDTH)
_WORKS: dict[str, tuple[Work, ...]] = {
    "pointwise": (
        _call(torch.add, _ROW, _ROW),
        _call(F.gelu, _WIDE),
        _call(torch.ops.aten.gelu_backward, _WIDE, _WIDE),
        _call(lambda x: x.mul_(0.5), _ROW, dtype=torch.float32),
    ),
    "copy": (
        _call(lambda x: x.to(torch.bfloat16), _ROW, dtype=torch.float32),
        _call(lambda x, y: torch.cat((x, y)), _ROW, _ROW),
    ),
    "memcpy": (_call(torch.clone, _ROW),),
    "reduction": (
        _call(lambda x, weight: F.layer_norm(x, (_WIDTH,), weight), _ROW, (_WIDTH,)),
        _layer_norm_backward,
        _call(lambda x: torch.log_softmax(x, -1), (_WARMED_ROWS // 8, _VOCABULARY)),
    ),
    "optimizer": (_adamw,),
    "gather": (_embedding,),
}


# The bytes that the simulator's cost models assign to a piece of work.
# A bandwidth efficiency is meaningful only for the bytes that the simulator divides by it. Therefore the work
# runs once on meta tensors, and the simulator's own prices give its bytes.


def bytes_moved(run: Callable[[torch.device], Callable[[], object]], profile: HardwareProfile) -> float:
    """Return the bytes that memory-bound kernels of ``run`` move; ``run(device)`` prepares the work."""
    meter = _Meter(profile)
    work = run(torch.device("meta"))
    with meter:
        work()
    return meter.seconds * profile.memory_bandwidth


class _Meter(TorchDispatchMode):
    """Sums operators' costs on a machine whose only cost is its memory's peak bandwidth."""

    def __init__(self, profile: HardwareProfile) -> None:
        super().__init__()
        whole = MappingProxyType(dict.fromkeys(profile.bandwidth.efficiency, 1.0))
        bandwidth = dataclasses.replace(profile.bandwidth, efficiency=whole, floor_us=0.0)
        self._costs = KernelCosts(dataclasses.replace(profile, bandwidth=bandwidth))
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seconds += price(func, args, kwargs or {}, out, self._costs).duration_ns / 1e9
        return out
