"""The whole calibration: which figures are measured, in which order, and where the others come from.

    base profile ─> compute, memory ─> products ─> attention ─> bandwidth ─> host, link ─> collectives ─> file
                                  (each step uses what earlier ones have measured)

Figures that this machine cannot show (for example the network, on one GPU) stay those of the base profile.
They are listed under ``estimated`` in the file, so that every report says so.
"""

import dataclasses
import datetime
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.base.configuration.simulated_cuda import simulated_cuda
from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.devices.detection import peak_flops_of
from fsdpbench.lab.calibrate import kernel_rates
from fsdpbench.lab.calibrate.host_costs import NOT_MEASURED, measure_host, measure_host_link
from fsdpbench.lab.calibrate.machine import Machine
from fsdpbench.sim.model.profile import HardwareProfile, load_profile, profile_names
from fsdpbench.sim.model.sections import (
    DTYPES,
    GIB,
    MIB,
    ContentionProfile,
    LinkCurve,
    NicProfile,
    NvlinkProfile,
)

_LOAD_SECONDS = 10.0
_QUICK_LOAD_SECONDS = 0.5


@dataclass(frozen=True)
class Calibration:
    """A measured profile.

    ``measured`` and ``assumed`` are dotted keys; ``errors`` are the mean relative errors of fits.
    """

    profile: HardwareProfile
    base: str
    measured: tuple[str, ...]
    assumed: tuple[str, ...]
    errors: dict[str, float]

    def to_toml_tables(self) -> dict[str, object]:
        """Return the file's content: the base, and all sections with a measured figure, which override it.

        All sections if the base is not a packaged profile, because a file can only build on those.
        """
        profile = self.profile
        measured = sorted({key.split(".")[0] for key in self.measured})
        packaged = self.base in profile_names()
        sections = measured if packaged else sorted({key.split(".")[0] for key in all_keys(profile)})
        tables = {
            **({"base": self.base} if packaged else {}),
            "name": profile.name,
            "title": profile.title,
            "source": profile.source,
            "gpus_per_node": profile.gpus_per_node,
            "estimated": list(self.assumed),
        }
        tables |= {name: _table(getattr(profile, name)) for name in sections}
        tables["sources"] = dict.fromkeys(measured, profile.source)
        return tables

    def write(self, path: Path) -> None:
        """Write the file, and check that it can be read."""
        write_whole(path, to_toml(self.to_toml_tables()))
        load_profile(str(path))


class _Run:
    """The profile as measured so far, and the measured keys."""

    def __init__(self, machine: Machine, profile: HardwareProfile) -> None:
        self.machine = machine
        self.profile = profile
        self.measured: list[str] = []
        self.errors: dict[str, float] = {}

    def take(self, section: str, value: Any, *kept: str) -> None:
        """Replace a section by its measurement; ``kept`` are its fields that were not measured."""
        self.profile = dataclasses.replace(self.profile, **{section: value})
        names = [field.name for field in dataclasses.fields(value) if field.name not in kept]
        self.measured += [f"{section}.{name}" for name in names]

    def take_fit(self, section: str, found: kernel_rates.Fit[Any], *kept: str) -> None:
        """Replace a section by its fit, and record the fit's error."""
        self.errors[section] = found.mean_error
        self.take(section, found.section, *kept)


def calibrate(
    machine: Machine,
    base: HardwareProfile,
    name: str,
    *,
    quick: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure ``machine`` and return its profile, called ``name``. Takes one to three minutes on a GPU.

    ``base`` is the profile of the nearest known hardware. With several ranks, all must call this in a process
    group. ``report`` is called with the title of each step when it begins.
    """
    run = _Run(machine, base)
    for title in _measure(run, _QUICK_LOAD_SECONDS if quick else _LOAD_SECONDS):
        report(title)
    node = machine.ranks_per_node if machine.world_size > 1 else base.gpus_per_node
    # A network that was not measured keeps its bandwidth per GPU.
    nic = run.profile.nic if "nic.gb_s_per_node" in run.measured else base.with_nodes(node, None).nic
    profile = dataclasses.replace(
        run.profile,
        name=name,
        title=machine.name,
        source=_source(machine),
        gpus_per_node=node,
        nic=nic,
        sources=MappingProxyType({}),
        estimated=(),
        # These describe the base's software and chip; runs are priced by what was measured here.
        libraries=MappingProxyType({}),
        runs_use=(),
        older=None,  # only one generation of kernels was measured; a file has the older one of its base
    )
    assumed = tuple(key for key in all_keys(profile) if key not in run.measured)
    return Calibration(profile, base.name, tuple(run.measured), assumed, run.errors)


def _measure(run: _Run, load_seconds: float) -> Iterator[str]:
    """Measure step by step; yield the title of each step before it begins."""
    machine = run.machine
    yield "memory and multiprocessors"
    _chip(run)
    yield "matrix products"
    run.take_fit("gemm", kernel_rates.measure_gemm(machine, run.profile, load_seconds), "tiles")
    yield "attention"
    run.take_fit(
        "attention",
        kernel_rates.measure_attention(machine, run.profile),
        "wave_quantisation",
        "flash_share",
        "kernel",
        "doubt",
    )
    yield "memory-bound operators"
    run.take("bandwidth", kernel_rates.measure_bandwidth(machine, run.profile), "fused_gain")
    yield "kernels of two streams"
    contention = measure_kernel_share(machine, run.profile.contention)
    run.take("contention", contention, "compute_slowdown", "communication_slowdown")
    yield "host"
    run.take("cpu", measure_host(machine, run.profile), NOT_MEASURED)
    yield "host link"
    run.take("host_link", measure_host_link(machine, run.profile.host_link), "memory_gb_s", "memory_gb")
    if machine.world_size > 1:
        yield "collectives"
        _collectives(run)


def _chip(run: _Run) -> None:
    machine, profile = run.machine, run.profile
    properties = machine.module.get_device_properties(machine.device)
    free, total = machine.module.mem_get_info()
    outside = total - free - machine.module.memory_reserved()
    kept = ["nccl_mib_per_communicator"]
    context, peak = profile.memory.context_mib, kernel_rates.peak_bandwidth(machine, profile)
    if peak == profile.memory.bandwidth_gb_s:
        kept.append("bandwidth_gb_s")
    if dist.is_initialized():
        kept.append("context_mib")  # the communicators' memory cannot be separated from the context's
    else:
        context = outside / MIB
    memory = dataclasses.replace(
        profile.memory, capacity_gib=total / GIB, context_mib=context, bandwidth_gb_s=peak
    )
    run.take("memory", memory, *kept)
    peaks = {dtype: peak_flops_of(machine.name, dtype) for dtype in DTYPES}
    known = {dtype: peak / 1e12 for dtype, peak in peaks.items() if peak is not None}
    compute = dataclasses.replace(
        profile.compute,
        sm_count=properties.multi_processor_count,
        peak_tflops=MappingProxyType(dict(profile.compute.peak_tflops) | known),
    )
    run.take("compute", compute, *(() if len(known) == len(DTYPES) else ("peak_tflops",)))


def _collectives(run: _Run) -> None:
    machine = run.machine
    node = machine.rank // machine.ranks_per_node
    nodes = machine.world_size // machine.ranks_per_node
    if machine.ranks_per_node > 1:
        groups = [
            dist.new_group(list(range(n * machine.ranks_per_node, (n + 1) * machine.ranks_per_node)))
            for n in range(nodes)
        ]
        nvlink = measure_nvlink(machine, run.profile, groups[node])
        run.take("nvlink", nvlink, "peak_gb_s", "ranks_exponent")
        contention = measure_contention(machine, run.profile)
        run.take("contention", contention, "communication_slowdown", "kernel_share")
    if nodes > 1:
        nic = measure_nic(machine, run.profile)
        run.take("nic", nic, "efficiency", "base_us", "tree_share", "protocols")


def _source(machine: Machine) -> str:
    today = datetime.date.today().isoformat()
    ranks = "" if machine.world_size == 1 else f", {machine.world_size} ranks"
    kind = "a simulated " if machine.simulated or simulated_cuda() is not None else ""
    return error_text("calibration.source", kind, machine.name, today, torch.__version__, ranks)


def all_keys(profile: HardwareProfile) -> Iterator[str]:
    """Yield the dotted keys of all figures."""
    for field in dataclasses.fields(profile):
        section = getattr(profile, field.name)
        if dataclasses.is_dataclass(section):
            yield from (f"{field.name}.{inner.name}" for inner in dataclasses.fields(section))


def _table(value: Any) -> Any:
    """Return a section as plain tables, lists and rounded numbers."""
    if dataclasses.is_dataclass(value):
        return {field.name: _table(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "items"):
        return {key: _table(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_table(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# How much kernels of two streams slow each other down: `ContentionProfile.kernel_share`.
#     one stream    [product][product]...[product]                     L
#     another       [copy][copy]...[copy]                              S, not longer
#     both          [product, slowed][..........][product]             L + kernel_share * S
#                   [copy, slowed][...]
# A GPU runs blocks of one kernel on resources that another leaves free. Two kernels that need the same ones
# gain nothing (1); a product and a copy overlap partly.

_SIZE = 8192
_PRODUCTS = 8
_ROUNDS = 5


def measure_kernel_share(machine: Machine, contention: ContentionProfile) -> ContentionProfile:
    """Return `contention` with the share measured by bf16 products and copies on this device."""
    a, source = machine.normal(_SIZE, _SIZE), machine.normal(_SIZE, _SIZE)
    target = machine.normal(_SIZE, _SIZE)

    def product() -> object:
        return a @ a

    def copy() -> object:
        return target.copy_(source)

    longer = machine.device_seconds(product) * _PRODUCTS
    one_copy = machine.device_seconds(copy)
    copies = max(1, int(longer / one_copy))
    both = statistics.median(_together(machine, product, copy, copies) for _ in range(_ROUNDS))
    share = (both - longer) / (copies * one_copy)
    return dataclasses.replace(contention, kernel_share=min(1.0, max(0.0, share)))


def _together(
    machine: Machine, product: Callable[[], object], copy: Callable[[], object], copies: int
) -> float:
    """Return the seconds until products and copies are done that start together on two streams."""
    module = machine.module
    first, second = module.current_stream(), module.Stream()
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    product()  # while it runs, the host queues the rest
    start.record(first)
    second.wait_event(start)
    for _ in range(_PRODUCTS):
        product()
    with module.stream(second):
        for _ in range(copies):
            copy()
    first.wait_stream(second)
    end.record(first)
    module.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


# Names since torch 2.13, which warns about the older ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_TINY = 1024
_BIG = 1 << 29


def measure_nvlink(machine: Machine, profile: HardwareProfile, group: dist.ProcessGroup) -> NvlinkProfile:
    """Measure all collectives inside one node; `group` has its ranks, at least two. The latency is the time
    of the smallest collective; curves are bus bandwidths without it, at the sizes in the base profile."""
    base, ranks = profile.nvlink, group.size()
    tiny = _seconds(machine, "all_gather", _TINY * ranks, group)
    # The smallest collective is all latency. The ratio of its parts is taken from the base.
    believed = base.base_us + base.per_rank_us * (ranks - 1)
    scale = tiny * 1e6 / believed if believed else 1.0
    base = dataclasses.replace(
        base, base_us=base.base_us * scale, per_rank_us=base.per_rank_us * scale, curve_ranks=ranks
    )
    return dataclasses.replace(
        base,
        all_gather=_curve(machine, base, "all_gather", group),
        reduce_scatter=_curve(machine, base, "reduce_scatter", group),
        all_reduce=_curve(machine, base, "all_reduce", group),
    )


def measure_nic(machine: Machine, profile: HardwareProfile) -> NicProfile:
    """Measure a node's total send bandwidth, by one large all-gather among all ranks of several nodes."""
    size = dist.get_world_size()
    wire = _BIG * (size - 1) / size
    bandwidth = wire / _seconds(machine, "all_gather", _BIG, None) / 1e9
    return dataclasses.replace(profile.nic, gb_s_per_node=bandwidth / profile.nic.efficiency)


def measure_contention(machine: Machine, profile: HardwareProfile) -> ContentionProfile:
    """Measure how much longer a product takes during an all-gather."""
    a = machine.normal(8192, 8192)
    alone = machine.device_seconds(lambda: a @ a)
    shard = torch.zeros(_BIG // dist.get_world_size(), dtype=torch.uint8, device=machine.device)
    whole = torch.zeros(shard.numel() * dist.get_world_size(), dtype=torch.uint8, device=machine.device)

    def beside() -> None:
        works = [_all_gather(whole, shard, async_op=True) for _ in range(8)]
        start, end = (machine.module.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(2):
            a @ a
        end.record()
        for work in works:
            work.wait()
        machine.module.synchronize()
        times.append(start.elapsed_time(end) / 2e3)

    times: list[float] = []
    for _ in range(5):
        beside()
    slowdown = sorted(times)[len(times) // 2] / alone
    return dataclasses.replace(profile.contention, compute_slowdown=max(1.0, slowdown))


def _curve(machine: Machine, base: NvlinkProfile, kind: str, group: dist.ProcessGroup) -> LinkCurve:
    """Return the bus bandwidth at the base's points, which count the bytes that one rank sends."""
    ranks = group.size()
    passes = 2 if kind == "all_reduce" else 1
    latency = (base.base_us + base.per_rank_us * passes * (ranks - 1)) * 1e-6
    points = []
    for wire, _ in getattr(base, kind).points:
        nbytes = max(ranks, int(wire * ranks / (ranks - 1) / passes) // (2 * ranks) * (2 * ranks))
        seconds = _seconds(machine, kind, nbytes, group)
        points.append((wire, wire / max(seconds - latency, seconds * 0.05) / 1e9))
    return LinkCurve(tuple(points))


def _seconds(machine: Machine, kind: str, nbytes: int, group: dist.ProcessGroup | None) -> float:
    """Return the device time of one collective over a whole buffer of ``nbytes`` (bf16)."""
    ranks = dist.get_world_size(group)
    whole = machine.normal(nbytes // 2)
    shard = machine.normal(nbytes // 2 // ranks)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: _all_gather(whole, shard, group=group),
        "reduce_scatter": lambda: _reduce_scatter(shard, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return machine.device_seconds(calls[kind])
