"""Fit the figures of a profile that a trace's samples determine; others keep the base's value, with a reason.

A figure is fitted if reducing it by 10 % changes some time by 2 % that earlier figures do not explain. Equal
calls are weighted by their time; so is the sum of a figure's calls. Prices: of one GPU, or a world's slowest.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import table_beside
from fsdpbench.lab.calibrate.calibration import Calibration, all_keys
from fsdpbench.lab.calibrate.from_trace.samples import Samples, priced_ns
from fsdpbench.lab.calibrate.nccl_tests import Point
from fsdpbench.lab.calibrate.network_fit import fit_network, slowest_hop_us
from fsdpbench.sim.model.chips import chip_of
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.keys import KEYS, ProfileError
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import HardwareProfile, load_profile, of_slowest
from fsdpbench.sim.model.sections import DTYPES, GIB, LinkCurve
from fsdpbench.sim.torch_device.prices import Call

_FITTED = table_beside(__file__, "fit.toml")
_GROUPS = (("bandwidth.efficiency", "bandwidth", "compute"), ("gemm",), ("attention",))
"""Figures that are fitted together; earlier ones take precedence in explaining times."""
_FEWEST, _STEP, _LEAST_EFFECT, _FARTHEST, _OUTLIER, _SUM = 3, math.log(0.9), 0.02, 30.0, 0.3, 5.0
_WORST = 0.2  # maximum scatter (a logarithm) of a figure's calls over the root of their number
_LONG_NS = 50e3  # shorter kernels of a real GPU do not show rates, because of caches and latency
_LOADED, _WAITS = 0.5, 0.1  # `_WAITS`: quantile of a collective's times, to exclude waiting
_WITHIN = {"operator": "launch", "autograd_node": "operator"}  # another figure included in a call's CPU time
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Figure:
    """A figure in base and trace, the number of calls that show it, their scatter; or why it `stays`."""

    key: str
    base: float
    found: float
    calls: int
    spread: float
    stays: str = ""

    def __str__(self) -> str:
        shown = f"{self.calls:9}{self.spread:8.0%}" if self.calls else "  as others are: no call shows it"
        line = f"stays: {self.stays}" if self.stays else f"{self.found:10.4g}{shown}"
        return f"{self.key:32}{self.base:12.4g}  {line}"


_Observation = tuple[Call, float, int, float]
"""A call, its median ns, its number of kernels, and its share of the time."""


def fit_trace(samples: Samples, base: str, name: str, source: str) -> tuple[Calibration, list[Figure], str]:
    """Return the packaged profile `base` fitted to samples, its figures, and a line about how well it
    reproduces the times. Raises `UsageError` if nothing can be fitted."""
    ranks = samples.ranks if samples.simulated else 1
    profile, chip = _of_chip(samples, load_profile(base))
    figures, costs = [*chip], KernelCosts(of_slowest(profile, ranks))
    observations = _observations(samples, costs)
    busy = f"the GPU is busy {samples.working / max(1, samples.span):.0%} of the time: "
    cool = not samples.simulated and samples.working < _LOADED * samples.span
    for sections in _GROUPS:
        keys = [f"{section}.{each}" for section in sections for each in _FITTED[section]]
        fitted, found = _fit_group(profile, keys, observations, ranks, 1 if samples.simulated else _FEWEST)
        if cool and len(sections) == 1:
            why = f"{busy}its clock is not that of steady training"
            fitted, found = profile, [dataclasses.replace(each, stays=each.stays or why) for each in found]
        profile, figures = fitted, figures + found
    profile, links = _links(samples, profile)
    profile, host = _host(samples, profile)
    figures += [*links, *host]
    unmatched = samples.unmatched / max(1, samples.busy)
    missing = f"{unmatched:.0%} of the kernels' time is of operators without shapes (record_shapes=True)"
    taken = {each.key for each in figures if each.calls and not each.stays}
    if taken <= {each.key for each in chip}:
        raise UsageError(f"--from-trace: nothing of {base} can be fitted to it: {missing} or a price")
    keys = [key for key in all_keys(profile) if not key.startswith("older.")]
    measured = tuple(key for key in keys if any(f"{each}.".startswith(f"{key}.") for each in taken))
    # A file with rates of another chip must state everything that depends on them.
    measured += ("gemm.tiles", "attention.floor_us") * any(key.startswith("compute.") for key in measured)
    assumed = tuple(key for key in keys if key not in measured)
    profile = dataclasses.replace(profile, name=name, source=source, estimated=assumed)
    after = KernelCosts(of_slowest(profile, ranks))
    was, now = (
        sum(each[3] * abs(math.expm1(_error(each, one))) for each in observations) for one in (costs, after)
    )
    line = f"its kernels' times are {was:.1%} off with {base}, {now:.1%} with this; {missing} or a price"
    return Calibration(profile, base, measured, assumed, {"kernels": now}), figures, line


def _error(observation: _Observation, costs: KernelCosts) -> float:
    return math.log(priced_ns(observation[0], costs) / observation[1])


def _get(profile: HardwareProfile, key: str) -> float:
    value: Any = profile
    for part in key.split("."):
        value = value.get(part, 0.0) if isinstance(value, Mapping) else getattr(value, part)
    return float(value)


def _with(profile: HardwareProfile, values: Mapping[str, float | LinkCurve]) -> HardwareProfile:
    for key, value in values.items():
        section, name, *rest = key.split(".")
        table = getattr(profile, section)
        whole = {**getattr(table, name), rest[0]: value} if rest else value
        profile = dataclasses.replace(profile, **{section: dataclasses.replace(table, **{name: whole})})
    return profile


def _of_chip(samples: Samples, base: HardwareProfile) -> tuple[HardwareProfile, list[Figure]]:
    """Return the base with the device's memory, and with the chip's data sheet if it is another chip."""
    found = {"memory.capacity_gib": samples.memory / GIB} if samples.memory else {}
    if (chip := chip_of(samples.device)) is not None:
        sheet = {"compute.sm_count": chip.sm_count, "memory.bandwidth_gb_s": chip.bandwidth_gb_s}
        peaks = chip.peak_tflops
        sheet |= {f"compute.peak_tflops.{kind}": peaks[kind] for kind in peaks if kind in DTYPES}
        other = any(abs(value / _get(base, key) - 1) > 0.02 for key, value in sheet.items())
        found |= sheet if other else {}
    figures = [Figure(key, _get(base, key), value, samples.traces, 0.0) for key, value in found.items()]
    return _with(base, found), figures


def _observations(samples: Samples, costs: KernelCosts) -> list[_Observation]:
    """Return the median time of each sample; of a call's variants, the one closest to the base's price."""
    found = []
    for each in samples.operators.values():
        ns = statistics.median(each.alone) if each.alone else 0.0
        if ns > (0 if samples.simulated else _LONG_NS):
            with suppress(RuntimeError):  # a product in a narrow type that the base has no table for
                call = min(each.calls, key=lambda call: abs(math.log(priced_ns(call, costs) / ns)))
                found.append((call, ns, each.kernels, ns * len(each.alone)))
    total = sum(time for _, _, _, time in found)
    return [(call, ns, kernels, time / total) for call, ns, kernels, time in found]


def _fit_group(
    profile: HardwareProfile, keys: Sequence[str], observed: Sequence[_Observation], ranks: int, fewest: int
) -> tuple[HardwareProfile, list[Figure]]:
    """Return the profile with the figures that the group's own calls determine, and a `Figure` per key."""
    # Every profile tried is validated, so keep it small. No figure changes tables of narrow products.
    used = {library: profile.libraries[library] for library in profile.runs_use}
    lean = dataclasses.replace(profile, libraries=used, estimated=(), sources={}, older=None)
    among = [each for each in observed if not each[0].func._schema.name.startswith("aten::_scaled_mm")]

    def errors(values: Mapping[str, float]) -> np.ndarray:
        costs = KernelCosts(of_slowest(_with(lean, values), ranks))
        return np.array([_error(each, costs) for each in among])

    now = {key: _get(profile, key) for key in keys if _get(profile, key) > 0}
    plain = errors({})
    effects = {key: (errors({key: value * math.exp(_STEP)}) - plain) / _STEP for key, value in now.items()}
    mine = np.sum([np.abs(effect) for effect in effects.values()], axis=0) >= 0.5
    among = [each for each, is_mine in zip(among, mine, strict=True) if is_mine]
    effects = {key: effect[mine] for key, effect in effects.items()}
    shows = {key: np.abs(effect * _STEP) >= _LEAST_EFFECT for key, effect in effects.items()}
    count = np.array([each[2] for each in among], int)
    kernels = {key: int(count[show].sum()) for key, show in shows.items()}
    stays = {key: f"{count} kernels show it" for key, count in kernels.items() if count < fewest}
    before: list[np.ndarray] = []
    for key in [key for key in now if key not in stays]:
        rest = effects[key] - sum((axis * (axis @ effects[key]) for axis in before), np.zeros(len(among)))
        if np.abs(rest * _STEP).max() < _LEAST_EFFECT:
            stays[key] = "no kernel shows it alone"
        else:
            before.append(rest / np.linalg.norm(rest))
    weights = np.array([each[3] for each in among])
    values, spreads = dict(now), dict.fromkeys(now, 0.0)
    while chosen := [key for key in now if key not in stays]:
        values = now | _solve(profile, {key: effects[key] for key in chosen}, errors, weights)
        left = errors({key: values[key] for key in chosen})
        for key in chosen:
            share = weights * np.abs(effects[key])
            spreads[key] = float(np.sqrt((share * left**2).sum() / share.sum()))
        unsure = {key: spreads[key] / math.sqrt(shows[key].sum()) for key in chosen}
        beyond = [key for key in chosen if values[key] > 0.99 * _most(profile, key) > now[key]]
        worst = max(chosen, key=lambda key: unsure[key])
        if not beyond and unsure[worst] <= _WORST:
            break
        stays |= dict.fromkeys(beyond, "its kernels are faster than the chip's peak, from caches")
        stays |= {} if beyond else {worst: f"its kernels scatter by {spreads[worst]:.0%} around it"}
    values |= {key: now[key] for key in stays}
    line = [(key, now[key], values[key], kernels[key], spreads[key], stays.get(key, "")) for key in now]
    fitted = {key: values[key] for key in now if key not in stays}
    return _with(profile, fitted), [Figure(*each) for each in line]


def _solve(
    profile: HardwareProfile, effects: Mapping[str, Any], errors: Any, weights: Any
) -> dict[str, float]:
    """Return the values of the figures in `effects` that minimize weighted errors of calls and of sums."""
    now = np.array([_get(profile, key) for key in effects])
    least = [max(KEYS[key].least, value / _FARTHEST) for key, value in zip(effects, now, strict=True)]
    most = np.array([_most(profile, key) for key in effects])
    shares = np.array([weights * (np.abs(effect) >= 0.5) for effect in effects.values()])
    sums = np.maximum(shares.sum(axis=1), 1e-9)

    def weighted(tried: np.ndarray) -> np.ndarray:
        found = errors(dict(zip(effects, tried.tolist(), strict=True)))
        whole = np.where(shares.any(axis=1), np.log(np.maximum(shares @ np.exp(found), 1e-9) / sums), 0)
        each = np.sqrt(weights) * _OUTLIER * np.arcsinh(found / _OUTLIER)
        return np.concatenate([each, _SUM * np.sqrt(sums) * whole])

    # Simulated times are whole nanoseconds, so scipy's default step size would not change them.
    start = np.clip(now, least, 0.99 * most)
    found = least_squares(weighted, start, bounds=(least, most), x_scale=now, diff_step=0.01)
    return dict(zip(effects, found.x.tolist(), strict=True))


def _links(samples: Samples, base: HardwareProfile) -> tuple[HardwareProfile, list[Figure]]:
    """Return the profile with the network that the collectives show, and its figures.

    Inside a node, rates are scaled by a factor at each size, interpolated between sizes (logarithmically).
    Between nodes, `fit_network` fits bandwidth and latency; only all-gathers show latency. Time that overlaps
    computation is longer by the base's `communication_slowdown`. Most of a real rank's times include waiting.
    """
    network, node, figures = Network(base, samples.ranks, base.gpus_per_node), base.gpus_per_node, []
    slowed, fewest = base.contention.communication_slowdown, 1 if samples.simulated else _FEWEST
    factors: dict[str, dict[float, float]] = {kind: {} for kind in _COLLECTIVES}
    between, counts, profile = list[Point](), Counter[str](), base
    for (kind, nbytes, ranks), times in samples.collectives.items():
        alone = [ns * (1 - share + share / slowed) for ns, share in times]
        ns = np.quantile(alone, 0.5 if samples.simulated else _WAITS)
        of_nodes = Counter(rank // node for rank in ranks)
        if kind not in factors or len(times) < fewest or len(set(of_nodes.values())) > 1:
            continue
        if (nodes := len(of_nodes)) > 1:
            between.append(Point(kind, nbytes, ns / 1e3, len(ranks), nodes))
            counts.update({"nic": len(times), "nic gathers": len(times) * (kind != "all_reduce")})
            continue
        counts[kind] += len(times)
        wire = nbytes * (len(ranks) - 1) / len(ranks) * (1 + (kind == "all_reduce"))
        known, start = (network.collective_ns(kind, each, ranks) for each in (nbytes, len(ranks)))
        factors[kind][math.log(wire)] = math.log(max(known - start, known / 9) / max(ns - start, ns / 9))
    for kind, found in factors.items():
        points, sizes = getattr(base.nvlink, kind).points, sorted(found)
        curve, why = LinkCurve(points), f"no curve from {counts[kind]} calls inside a node"
        with suppress(ProfileError, ValueError):  # the curve would fall, or there is no size of this kind
            by = np.exp(np.interp([math.log(wire) for wire, _ in points], sizes, [found[at] for at in sizes]))
            curve = LinkCurve(tuple((at, rate * each) for (at, rate), each in zip(points, by, strict=True)))
            profile, why = _with(profile, {f"nvlink.{kind}": curve}), ""
        figures.append(Figure(f"nvlink.{kind}", points[-1][1], curve.points[-1][1], counts[kind], 0.0, why))
    kept = late = f"{counts['nic']} collectives between nodes, none large enough to show it"
    with suppress(UsageError):  # no collective is large enough to show the bandwidth
        fit = fit_network(between, profile, node)
        late = "no collective between nodes is small enough to show it" * ("latency" in fit.kept)
        profile, kept = fit.profile, ""
    of_nic = ("gb_s_per_node", "nic", kept), ("efficiency", "nic", kept), ("base_us", "nic gathers", late)
    figures += [
        Figure(f"nic.{key}", _get(base, f"nic.{key}"), _get(profile, f"nic.{key}"), counts[by], 0.0, why)
        for key, by, why in of_nic
    ]
    hops = slowest_hop_us(base), slowest_hop_us(profile)
    figures.append(Figure("nic.protocols.nic_hop_us", *hops, counts["nic gathers"], 0.0, late))
    return profile, figures if samples.ranks > 1 else []


def _host(samples: Samples, base: HardwareProfile) -> tuple[HardwareProfile, list[Figure]]:
    """Return the profile with the CPU times that a simulated trace shows, and its figures.

    A trace does not show how many Python calls are between operators. They are scaled like operators and
    views. A real profiler lengthens everything by a share that a trace does not show: the base's values stay.
    """
    us = {"": 0.0} | {kind: statistics.median(each) / 1e3 for kind, each in samples.host.items() if each}
    found = {
        f"{kind}_us": (value, len(samples.host[kind]))
        for kind, whole in us.items()
        if (value := whole - us.get(_WITHIN.get(kind, ""), math.nan)) > 0
    }
    known = [key for key in ("operator_us", "view_us") if key in found and getattr(base.cpu, key)]
    if samples.simulated and known:
        scale = statistics.fmean(found[key][0] / getattr(base.cpu, key) for key in known)
        rest = [field.name for field in dataclasses.fields(base.cpu) if not field.name.startswith("cuda_")]
        found = {key: (scale * getattr(base.cpu, key), 0) for key in rest} | found
    figures = [Figure(f"cpu.{key}", _get(base, f"cpu.{key}"), *each, 0.0) for key, each in found.items()]
    if samples.simulated:
        return _with(base, {each.key: each.found for each in figures}), figures
    why = "{:.3g} under the profiler, which lengthens it"
    return base, [dataclasses.replace(each, stays=why.format(each.found)) for each in figures]


def _most(profile: HardwareProfile, key: str) -> float:
    """Return the maximum of a figure that the profile's other figures allow."""
    if key.startswith("bandwidth.efficiency"):
        return 1 / max(1.0, profile.bandwidth.fused_gain)
    peak = min(profile.compute.peak_tflops["bf16"], profile.compute.peak_tflops["fp16"])
    return peak if key.endswith("ward_tflops") else min(KEYS[key].most, _get(profile, key) * _FARTHEST)
