"""The width of a 90 % interval, from the residuals of held-out runs.

    known          runs of sources to which no constant was fitted, predicted with everything known of them
    + chip         ... on a chip to which nothing was fitted, or predicted with the keys of another chip
    + network      ... predicted with the packaged network instead of theirs
    + system       ... predicted with the other one of PyTorch's FSDPs
    + software     ... predicted with today's software instead of theirs
    + model        ... whose shape or settings had to be assumed
    + setting      ... with settings that no other run has: tensor parallelism, fp8, LoRA
    + memory       ... that retried allocations, or nearly filled the memory

A width is the 90 % quantile of |ln(measured / predicted)|. Every group of runs (source, chip, family) has the
same weight, however many runs it has, because its runs share errors, and a user's case is a new group. Each
unknown aspect adds its variance: sqrt(known^2 + sum(aspect^2 - known^2)).

Between nodes the network's rate is the largest unknown. If collectives between nodes, run alone, would be a
share s of a step, and take f times as long, the step takes 1 + f s - max(s, 0.72) times as long: computation
hides them up to a share of 0.72. That widens the interval upwards, unless the network was measured
(`Width.with_network`). The part of a residual that the network explains does not count for the rest.

Conformal prediction for grouped data after Dunn, Wasserman and Ramdas (arXiv 1809.07441). Only a handful of
groups show how much groups differ, so the quantile is multiplied by Student's t over the normal quantile, as
in prediction intervals of random-effects models (Higgins, Thompson and Spiegelhalter 2009). With fewer groups
than `_FEW_GROUPS` (memory, networks) the largest residual replaces the quantile.
"""

import csv
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import NormalDist

import msgspec

TABLE = Path(__file__).with_name("residuals.csv")


class Condition(StrEnum):
    """The aspect of a run that was treated as unknown when it was predicted (`ci/residual_rows.py`)."""

    KNOWN = "known"
    NEW_CHIP = "new chip"
    CHIP = "chip"
    NETWORK = "network"
    SYSTEM = "system"
    SOFTWARE = "software"
    MODEL = "model"
    SETTING = "setting"


AS_IT_WAS = (Condition.KNOWN, Condition.NEW_CHIP)  # predicted with everything known of the run


class Quantity(StrEnum):
    """The quantity whose measurement and prediction a residual compares."""

    TIME = "time"
    ALLOCATED = "allocated"
    ACTIVE = "active"
    RESERVED = "reserved"


@dataclass(frozen=True)
class Residual:
    """One figure of one published run and its prediction, in the publication's unit: a row of
    `residuals.csv`.

    ci/measure_residuals.py writes the file. A residual is ln(measured / predicted) of the step time (above
    0: slower than predicted) or of a memory peak. Rows of one `source` come from the same people and
    software and share errors, so a whole source is held out.
    """

    condition: Condition
    source: str
    chip: str
    run: str
    model: str
    """The model's name and shape fields."""
    family: str
    system: str
    software: str
    fitted: bool
    """Whether constants were fitted to this source."""
    compiled: bool
    gpus: int
    nodes: int
    network: str
    retries: float
    """The predicted number of allocator retries per step."""
    full: float
    """The predicted peak of reserved memory as a share of the memory that the allocator can use."""
    network_share: float
    """The predicted time of collectives between nodes, alone, divided by the step time."""
    quantity: Quantity
    unit: str
    published: float
    predicted: float
    log_ratio: float

    @property
    def group(self) -> tuple[str, str, str]:
        """Return (source, chip, family): predictions of runs in one group share errors."""
        return (self.source, self.chip, self.family)

    @property
    def needed(self) -> float:
        """Return the smallest width, before the network's part, whose interval contains the run."""
        network = by_network(self.network_share, self.gpus) if self.quantity is Quantity.TIME else 0.0
        return math.sqrt(max(0.0, self.log_ratio**2 - network**2 * (self.log_ratio > 0)))


@functools.cache
def read_table(path: Path = TABLE) -> tuple[Residual, ...]:
    """Return every residual of the file."""
    with path.open(newline="") as file:
        rows = [
            {**row, **{name: row[name] == "yes" for name in ("fitted", "compiled")}}
            for row in csv.DictReader(file)
        ]
    return msgspec.convert(tuple(rows), tuple[Residual, ...], strict=False)


LEVEL = 0.9
APART = 0.0464
"""The largest |ln(ratio)| at which two steps of the same model and machine cannot be distinguished without
further knowledge: the spread of residuals of a model's runs (`ci/measure_differences.py`)."""
_FEW_RUNS = 5
_FEW_GROUPS = 4
MORE_GPUS = "more than 512 GPUs, where published runs disagree"
# A study of GPTs (MareNostrum 5) is, relative to its own few nodes, within 12 % of the simulation up to 512
# GPUs. Some of its runs on 1,024 and 2,048 GPUs are too; others take 1.2 to 1.5 times as long as those.
_AGREED_GPUS = 512
_MISSED_A_DOUBLING = 0.21
# The share of a node's data sheet bandwidth that rings reach: 0.98 (llm-foundry's H100s), 0.75 (its A100s;
# MareNostrum 5 on 512 GPUs), 0.24 (Leonardo). Profiles have 0.75 and more. A run on 128 GPUs of Leonardo is
# predicted correctly if its collectives, with latency, take 2.3 times as long as simulated.
_SLOWER = 2.5
_HIDDEN = 0.72
"""The share of a step that collectives can take before they lengthen it, from 32 GPTs simulated on networks
that are two and three times slower."""
OTHER_KIND = 0.26
"""The smallest width (|ln|) of a memory peak for models and settings that no published run has, from 16 peaks
of five sources to which no constant was fitted (`ci/measured/memory_kinds.txt`)."""
COMPOSED = 0.13
"""ln of how much longer an eager step takes with RMSNorms and rotary embeddings composed of operators
(docs/validation.md), where a user does not say how they are written."""
NAMED = 0.1
"""The smallest |ln| from which an unmeasured network or link is named as a reason."""


class Unknown(StrEnum):
    """A reason for a wider interval, in words for users."""

    CHIP = "no published run on this chip"
    NETWORK = "network between nodes not stated"
    SYSTEM = "no published run of this system"
    SOFTWARE = "no published run of this software"
    MODEL = "no published run of this kind of model, optimizer and dtype is known in full"
    SETTING = "few published runs have settings like these"
    OFFLOAD = "no published run offloads activations"
    NORMS = "RMSNorms may be composed of operators, 10 to 14 % slower on H100: --set norm=composed or fused"
    LINK = "bandwidth to the host not measured with all GPUs of a node: fsdpbench calibrate narrows it"
    HOST = "the optimizer runs on the host, whose speed is not measured"
    ATTENTION = "no published rates of this kernel of attention on this chip"
    PCIE = "links inside a node are PCIe, whose rates differ between machines: fsdpbench calibrate narrows it"
    UNMEASURED = "network between nodes not measured: fsdpbench calibrate --nccl-tests narrows it"
    COMPILED = "no compiled run could be compared"
    MEMORY = "memory is full: the allocator retries"
    NEARLY_FULL = "memory is nearly full"


@dataclass(frozen=True)
class Width:
    """Half an interval's width, as |ln(measured / predicted)|, and why it exceeds that of known runs.

    `runs`: number of residuals of known runs behind it. `network`: additional ln by which a time may be
    longer, but not shorter, if the network was not measured.
    """

    log: float
    because: tuple[Unknown, ...]
    runs: int
    network: float = 0.0

    def around(self, value: float) -> tuple[float, float]:
        """Return the interval of a figure predicted as `value`."""
        return value * math.exp(-self.log), value * math.exp(math.hypot(self.log, self.network))

    def covers(self, log_ratio: float) -> bool:
        """Return whether ln(measured / predicted) is inside the interval."""
        return -self.log <= log_ratio <= math.hypot(self.log, self.network)

    @property
    def half(self) -> float:
        """Return half the interval as a share of its middle."""
        low, high = self.around(1.0)
        return (high - low) / (high + low)

    def with_network(self, share: float, gpus: int, measured: bool = False) -> "Width":
        """Return the width of a time on `gpus` GPUs; collectives between nodes are a `share` of it."""
        network = by_network(0.0 if measured else share, gpus)
        named = (Unknown.UNMEASURED,) if by_network(share, 1) > NAMED and not measured else ()
        return dataclasses.replace(self, network=network, because=(*self.because, *named))


def by_network(share: float, gpus: int) -> float:
    """Return ln of the factor by which a step may be longer, because the network was not measured, or because
    no published runs have as many GPUs. `share`: of collectives between nodes, alone, in the step."""
    beyond = math.log2(max(1.0, gpus / _AGREED_GPUS))
    longer = math.log1p(max(0.0, _SLOWER * share - max(share, _HIDDEN)))
    return math.hypot(longer, _MISSED_A_DOUBLING * beyond)


_SAVED_BY_LINKS = 0.9
"""The share of the time of collectives over PCIe that another machine may save: eight L40S without peer
access between sockets reached 2.2 GB/s; PCIe 4.0 has ten times that bandwidth."""


def by_faster_links(share: float, kernels: float) -> float:
    """Return |ln| of the factor by which a step may be shorter on another machine's PCIe. `share`, `kernels`:
    shares of the step; collectives over PCIe, alone, and kernels, whose time stays the same."""
    return -math.log(min(1.0, max(1 - _SAVED_BY_LINKS * min(share, 1.0), kernels)))


# Packaged profiles have three quarters of PCIe's bandwidth. One H100 and one H200, alone, reached 4 and 11 %
# more (ci/measured/gpu). If all GPUs copy, each may get half: two share a DGX A100's switch (from memory).
_FASTER_LINK, _NEAR_LINK = 1.1, 0.1


def by_link(step: float, slow: float, measured: bool) -> tuple[float, float]:
    """Return |ln| of the factors by which a step may be shorter and longer because of the link to the host.
    `slow`: the step if copies take twice as long. A step is the longest of many sums of durations, so it is
    convex in the time of copies: x of it more adds at most x of `slow` - `step`. `measured`: to 10 %."""
    more = max(0.0, slow / step - 1)
    saved = min(more * (1 - 1 / _FASTER_LINK), 1 / 2)
    return -math.log1p(-saved), math.log1p(more * (_NEAR_LINK if measured else 1))


_SLOWER_HOST, _FASTER_HOST, _NEAR_HOST = 3.2, 0.25, 0.1
"""Packaged profiles have three quarters of the memory bandwidth of a DGX, shared by its ranks: 57 GB/s on an
H100. AdamW with `foreach` and one thread, torchrun's default, reached 17.8 on one EPYC, the fused one 38.5
(`ci/measured/operators.txt`)."""


def by_host_optimizer(share: float, measured: bool) -> tuple[float, float]:
    """Return |ln| of the factors by which a step may be shorter and longer because of the host's memory, if
    optimizer steps on the host take a `share` of it. `measured`: to 10 %."""
    longer = _NEAR_HOST if measured else _SLOWER_HOST - 1
    shorter = _NEAR_HOST if measured else _FASTER_HOST
    return -math.log1p(-min(share, 1.0) * shorter), math.log1p(share * longer)


def is_beyond(gpus: int) -> bool:
    """Return whether published runs on this many GPUs disagree with each other."""
    return gpus > _AGREED_GPUS


def width_of(
    quantity: Quantity,
    unknown: Sequence[Unknown],
    compiled: bool = False,
    without: str | None = None,
    without_run: str | None = None,
    rows: Sequence[Residual] | None = None,
) -> "Width":
    """Return the width for a prediction with `unknown` parts.

    `without` holds a source out, `without_run` a single run.

    Compiled runs have their own width if any of them could be compared.
    """
    # None means the packaged table: hashing its rows for the cache would take longer than the rest.
    table = None if rows is None else tuple(rows)
    return _width(quantity, tuple(dict.fromkeys(unknown)), compiled, (without, without_run), table)


@functools.cache
def _width(
    quantity: Quantity,
    unknown: tuple[Unknown, ...],
    compiled: bool,
    without: tuple[str | None, str | None],
    table: tuple[Residual, ...] | None,
) -> "Width":
    source, run = without
    rows = read_table() if table is None else table
    others = [row for row in rows if row.quantity is quantity and row.source != source and row.run != run]
    known = [row for row in others if is_held_out(row) and not row.compiled]
    base = max(_safe_quantile(known), _worst_source([row for row in others if _is_known(row)]))
    because = list(unknown)
    if compiled:
        compared = [row for row in others if is_held_out(row) and row.compiled]
        base, known = max(base, _safe_quantile(compared)), compared or known
        because += [] if compared else [Unknown.COMPILED]
    edge = _edge(table)
    extra = sum(
        max(0.0, _safe_quantile([row for row in others if _tells(row, aspect, edge)]) ** 2 - base**2)
        for aspect in because
    )
    return Width(math.sqrt(base**2 + extra), tuple(because), len(known))


@functools.cache
def _edge(table: tuple[Residual, ...] | None) -> float:
    """Return the share of the memory above which a predicted peak's interval may reach all of it."""
    rows = read_table() if table is None else table
    reserved = [row for row in rows if row.quantity is Quantity.RESERVED and is_held_out(row)]
    return math.exp(-_safe_quantile(reserved))


def is_held_out(row: Residual) -> bool:
    """Return whether the row is a residual of known software on known chips, not fitted to its source."""
    return _is_known(row) and not row.fitted


def _is_known(row: Residual) -> bool:
    return row.condition is Condition.KNOWN and not row.retries


def _tells(row: Residual, aspect: Unknown, edge: float) -> bool:
    """Return whether `row` counts as evidence for the width of `aspect`."""
    if aspect is Unknown.MEMORY:
        return bool(row.retries) and row.condition is Condition.KNOWN
    ordinary = not row.retries and (not row.compiled or aspect is Unknown.SETTING)
    if aspect is Unknown.NEARLY_FULL:
        return ordinary and row.condition is Condition.KNOWN and row.full > edge
    return ordinary and row.condition in _UNDER.get(aspect, ())


_UNDER = {
    Unknown.CHIP: (Condition.CHIP, Condition.NEW_CHIP),
    Unknown.NETWORK: (Condition.NETWORK,),
    Unknown.SYSTEM: (Condition.SYSTEM,),
    **dict.fromkeys((Unknown.SOFTWARE, Unknown.COMPILED), (Condition.SOFTWARE,)),
    Unknown.MODEL: (Condition.MODEL,),
    Unknown.SETTING: (Condition.SETTING,),
}


def _safe_quantile(rows: Sequence[Residual]) -> float:
    """Return `weighted_quantile`, widened because there are few groups."""
    groups = len({row.group for row in rows})
    factor = 1.0 if groups < _FEW_GROUPS else widening(groups)
    return weighted_quantile(rows) * factor


def _worst_source(rows: Sequence[Residual]) -> float:
    """Return the widest quantile of one source's eager runs, widened because there are few runs. Among fewer
    than ten sources, nine in ten new ones should not exceed the worst; with more, return 0. Fitted sources
    count, because fitting only reduces errors."""
    by_source: dict[str, list[float]] = {}
    for row in rows:
        if not row.compiled:
            by_source.setdefault(row.source, []).append(row.needed)
    if len(by_source) >= 1 / (1 - LEVEL):
        return 0.0
    own = [sorted(each) for each in by_source.values() if len(each) >= _FEW_RUNS]
    return max((each[math.ceil(LEVEL * len(each)) - 1] * widening(len(each)) for each in own), default=0.0)


def widening(groups: int) -> float:
    """Return the ratio of Student's t with `groups` - 1 degrees of freedom to the normal quantile, two-sided
    at `LEVEL` (Cornish-Fisher expansion, within 1 % from 3 degrees of freedom on)."""
    z, freedom = NormalDist().inv_cdf((1 + LEVEL) / 2), groups - 1
    return (
        1
        + (z**2 + 1) / (4 * freedom)
        + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)
        + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * freedom**3)
    )


def weighted_quantile(rows: Sequence[Residual], level: float = LEVEL) -> float:
    """Return the smallest width that covers `level` of the rows, groups weighted equally; 0 without rows.

    With fewer than `_FEW_GROUPS` groups it covers all rows.
    """
    sizes = Counter(row.group for row in rows)
    level = 1.0 if len(sizes) < _FEW_GROUPS else level
    reached = 0.0
    for row in sorted(rows, key=lambda each: each.needed):
        reached += 1 / sizes[row.group]
        if reached >= level * len(sizes) - 1e-9:
            return row.needed
    return 0.0
