"""The 90 % interval of a simulated result.

Computed from the simulation's figures and from the residuals of published runs (`widths.py`). It needs no
further simulation and changes no figure.
"""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from fsdpbench.base.configuration.config import PARALLEL, Config
from fsdpbench.base.settings import SETTINGS
from fsdpbench.engine.results.residuals import widths
from fsdpbench.reports.figures import FIGURES
from fsdpbench.reports.result import Interval, PeakMemory, Result, Span
from fsdpbench.sim.model.profile import (
    HardwareProfile,
    ProfileError,
    load_profile,
    profile_layers,
    profile_names,
)
from fsdpbench.sim.model.software import CURRENT, OF_MODELS, load_software, software_names

_LANGUAGE_MODEL = {"layers", "d_model", "heads", "vocab"}
_UNUSUAL = (*PARALLEL, "lora", "optimizer_dtype", "linear_dtype", "graph", "symmetric_memory")
"""Settings that known published runs have at their defaults."""
_UNLIKE = ("expert", "window", "sinks", "score_cap")
"""Parts of names of shape fields that no model of a published run sets."""

_PEAKS = (widths.Quantity.ALLOCATED, widths.Quantity.ACTIVE, widths.Quantity.RESERVED)
_MEMORY_KNOWS = (widths.Unknown.CHIP, widths.Unknown.NETWORK, widths.Unknown.COMPILED, widths.Unknown.MEMORY)
"""Unknowns that do not affect a run's memory, or that no published run reports."""
_STATED = (widths.Unknown.MODEL, widths.Unknown.SETTING, widths.Unknown.OFFLOAD)


def interval_of(config: Config, result: Result, work: dict[str, float] | None = None) -> Interval | None:
    """Return the `interval` of a simulated result with a step time; None for any other result. `work`: the
    rank's `step_work`."""
    step, hardware = result.step_time_s, config.hardware or ""
    if config.device != "sim" or not step:
        return None
    unknown = unknowns(config)
    memory, risky = _memory(config, result.peak_memory_bytes, unknown)
    retries = bool(result.alloc_retries_per_step)
    full = [widths.Unknown.MEMORY] if retries else [widths.Unknown.NEARLY_FULL] if risky else []
    _, chip = _machine(hardware, _stamp(hardware))
    on_one_node, share = config.gpus <= config.ranks_per_node, result.network_share or 0.0
    pcie = _has_unknown_links(hardware)
    network = share, config.gpus, not pcie and (on_one_node or is_measured(hardware))
    known_kind = [each for each in unknown if each is not widths.Unknown.SETTING]
    time, alike = (
        widths.width_of(widths.Quantity.TIME, each, bool(config.settings.compile)).with_network(*network)
        for each in ([*unknown, *full], [*known_kind, *full])
    )
    if chip is not None and (doubt := chip.with_attention(config.settings.attention).attention.doubt) > 1:
        log = math.hypot(time.log, math.log(doubt))  # as if the whole step were attention
        time = dataclasses.replace(time, log=log, because=(*time.because, widths.Unknown.ATTENTION))
    work = work or {}
    faster = widths.by_faster_links(share, work.get("kernels", 0.0) / step) if pcie else 0.0
    link, of_host = _by_host(hardware, step, work)
    named = {widths.Unknown.UNMEASURED: widths.Unknown.PCIE} if pcie else {}
    because = [named.get(each, each).value for each in time.because]
    composed = _may_be_composed(config)
    because += [widths.MORE_GPUS] * widths.is_beyond(config.gpus) + [widths.Unknown.NORMS.value] * composed
    because += of_host
    low = step * math.exp(-math.hypot(time.log, link[0], faster))
    high = step * math.exp(math.hypot(time.log, time.network, link[1], widths.COMPOSED * composed))
    rates: dict[str, Span] = {
        figure.path: (value * step / high, value * step / low)
        for figure in FIGURES
        if figure.is_rate and (value := figure.of(result))
    }
    return Interval(
        level=widths.LEVEL,
        step_time_s=(low, high),
        **rates,
        peak_memory_bytes=memory,
        risky=risky or retries,
        because=because,
        runs=time.runs,
        apart=math.expm1(widths.APART),
        shared=(alike.half, time.half),
        link=link,
        work=work["kernels"] / step if work else None,
    )


def _by_host(hardware: str, step: float, work: Mapping[str, float]) -> tuple[tuple[float, float], list[str]]:
    """Return |ln| of the factors by which a step may be shorter and longer because of the link to the host
    and the optimizer there, and the reasons that are worth naming."""
    known_link, known_rate = (is_measured(hardware, f"host_link.{key}") for key in ("gb_s", "memory_gb_s"))
    link = widths.by_link(step, work.get("slow_link_step", step + work.get("host_copies", 0.0)), known_link)
    host = widths.by_host_optimizer(work.get("host_optimizer", 0.0) / step, known_rate)
    because = [widths.Unknown.LINK.value] * (not known_link and link[1] > widths.NAMED)
    because += [widths.Unknown.HOST.value] * (not known_rate and host[1] > widths.NAMED)
    return (math.hypot(link[0], host[0]), math.hypot(link[1], host[1])), because


def _may_be_composed(config: Config) -> bool:
    """Return whether eager RMSNorms are fused in this prediction, and the user does not say so."""
    said = config.software or "norms" in config.shape_given or config.settings.norm != "model"
    is_ours = config.script is None and config.settings.implementation == "own"
    return is_ours and not said and not config.settings.compile and config.shape.get("norms") == "fused"


def read_ahead() -> None:
    """Read all files that `interval_of` needs, in the process that forks those that compute results."""
    _known()
    for quantity in (widths.Quantity.TIME, *_PEAKS):
        widths.width_of(quantity, ())


def unknowns(config: Config) -> tuple[widths.Unknown, ...]:
    """Return the aspects of a configuration that no published run covers."""
    found = []
    chips, software, families = _known()
    # A layer without `compute` is a variant of a chip; a packaged one is a chip of its own.
    layers, _ = _machine(config.hardware or "", _stamp(config.hardware))
    variants = list(itertools.takewhile(lambda layer: "compute" not in layer[1], layers))
    if next((name for name, _ in layers if name in profile_names()), None) not in chips:
        found.append(widths.Unknown.CHIP)
    if config.gpus > config.ranks_per_node and not any("nic" in keys for _, keys in variants):
        found.append(widths.Unknown.NETWORK)
    own, named = config.software or CURRENT, {name for _, name in software}
    if own not in named and own in software_names() and _is_todays(own):
        own = CURRENT
    if config.script is not None or own not in named:
        found.append(widths.Unknown.SOFTWARE)
    elif (config.system, own) not in software:
        found.append(widths.Unknown.SYSTEM if own == CURRENT else widths.Unknown.SOFTWARE)
    if config.script is None and (
        not _is_known_kind(config, families)
        or config.settings.param_dtype not in ("bf16", "fp16")
        or config.settings.implementation != "own"
    ):
        found.append(widths.Unknown.MODEL)
    elif config.script is None and (
        any(getattr(config.settings, name) not in (None, SETTINGS[name].default) for name in _UNUSUAL)
        or config.settings.optimizer == "muon"
        or config.settings.attention == "math"
        or config.settings.loss in ("chunked", "fused")
    ):
        found.append(widths.Unknown.SETTING)
    if config.settings.activation_offload:
        found.append(widths.Unknown.OFFLOAD)
    return tuple(found)


def _has_unknown_links(hardware: str) -> bool:
    """Return whether links inside a node are PCIe, and no user's file has measured rates of them."""
    _, chip = _machine(hardware, _stamp(hardware))
    known = is_measured(hardware, "nvlink") or is_measured(hardware, "libraries")
    return chip is not None and chip.has_pcie_links and not known


def is_measured(hardware: str, key: str = "nic.base_us") -> bool:
    """Return whether a user's own file has the key or table and does not mark it as estimated."""
    layers, profile = _machine(hardware, _stamp(hardware))
    own = [keys for _, keys in itertools.takewhile(lambda layer: layer[0] not in profile_names(), layers)]
    stated = f"+{key.partition('.')[0]}-" in hardware
    if stated or profile is None or not any(key in keys for keys in own):
        return False
    return "estimated" not in own[0] or key not in profile.estimated


@functools.cache
def _known() -> tuple[frozenset[str], frozenset[tuple[str, str]], frozenset[str]]:
    """Return the chips, (system, software) pairs and families of published runs.

    Software that differs from today's only in model code counts as today's: a shape sets that code.
    """
    rows = [row for row in widths.read_table() if row.condition is widths.Condition.KNOWN]
    software = {(row.system, row.software) for row in rows}
    todays = {(system, CURRENT) for system, name in software if _is_todays(name)}
    return (
        frozenset(row.chip for row in rows),
        frozenset(software | todays),
        frozenset(row.family for row in rows),
    )


@functools.cache
def _is_todays(software: str) -> bool:
    return load_software(software).changes_only(OF_MODELS)


def _is_known_kind(config: Config, families: Iterable[str]) -> bool:
    """Return whether the model is of a family with published runs, or a similar dense language model.

    Decided by name (`gpt-2.8b`, `llama3-8b`) and shape fields, because building the model would import torch.
    """
    if any(value and part in name for name, value in config.shape.items() for part in _UNLIKE):
        return False
    family = re.split(r"[-+]", config.model)[0].rstrip("0123456789.")
    if family in {name.rstrip("0123456789.") for name in families}:
        return True
    return config.shape.keys() >= _LANGUAGE_MODEL


def _memory(
    config: Config, peaks: PeakMemory | None, unknown: Sequence[widths.Unknown]
) -> tuple[dict[str, Span], bool]:
    """Return intervals of the peaks in bytes; whether that of reserved memory exceeds the device's."""
    # For runs of other kinds, `widths` covers an assumed model; here the user states the model.
    of_memory = [reason for reason in unknown if reason not in (*_MEMORY_KNOWS, *_STATED)]
    least = widths.OTHER_KIND if any(reason in _STATED for reason in unknown) else 0.0
    _, chip = _machine(config.hardware or "", _stamp(config.hardware))
    usable = None if chip is None else chip.usable_memory_bytes
    found: dict[str, Span] = {}
    risky = False
    for kind in _PEAKS:
        value = getattr(peaks, kind.value, None)
        if not value:
            continue
        width = widths.width_of(kind, of_memory)
        low, high = dataclasses.replace(width, log=max(width.log, least)).around(value)
        risky |= kind is widths.Quantity.RESERVED and usable is not None and high > usable
        most = high if usable is None else min(high, max(usable, value))
        found[kind.value] = round(low), round(most)
    return found, risky


@functools.lru_cache(maxsize=64)
def _machine(hardware: str, stamp: int) -> tuple[list[tuple[str, frozenset[str]]], HardwareProfile | None]:
    """Return a profile and its layers. `stamp`, its file's time, makes the cache read a changed file."""
    try:
        return profile_layers(hardware), load_profile(hardware)
    except ProfileError:
        return [], None


def _stamp(hardware: str | None) -> int:
    try:
        return os.stat(re.sub(r"\+(node|nic)-.*", "", hardware or "")).st_mtime_ns
    except OSError:
        return 0  # the name of a packaged profile
