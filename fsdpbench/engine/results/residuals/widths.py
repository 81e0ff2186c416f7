"""The width of a 90 % interval, from the residuals of runs that were held out.

    known          runs of sources to which no constant was fitted, as they were
    + chip         ... on a chip to which nothing was fitted, or predicted with the keys of another chip
    + network      ... predicted with the packaged network instead of theirs
    + system       ... predicted with the other one of PyTorch's FSDPs
    + software     ... predicted with today's software instead of theirs
    + model        ... whose shape or settings had to be assumed
    + setting      ... with settings that no other run has: tensor parallelism, fp8, LoRA
    + memory       ... that retried allocations, or nearly filled the memory

A width is the 90 % quantile of |ln(measured / predicted)|, in which every group of runs (source, chip,
family) counts alike, however many runs it has: they share errors, and a user's case is a new group. What is
unknown adds its variance: sqrt(known^2 + sum(aspect^2 - known^2)).

Between nodes the network's rate is the largest unknown. Where collectives between nodes, alone, are a share
s of a step and take f times as long, the step takes 1 + f s - max(s, 0.72) times as long: up to 0.72,
computation hides them. That widens the interval upwards, unless the network was measured
(`Width.with_network`). What the network explains of a residual does not count for the rest.

Conformal prediction for grouped data after Dunn, Wasserman and Ramdas (arXiv 1809.07441). How much groups
differ is known from a handful of them; as in prediction intervals of random-effects models (Higgins, Thompson
and Spiegelhalter 2009) the quantile is widened by Student's t over the normal quantile. With fewer groups
than `_FEW_GROUPS` (memory, networks) the largest residual takes its place.
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
    """The part of a run that was unknown when it was predicted (`ci/residual_rows.py`)."""

    KNOWN = "known"
    NEW_CHIP = "new chip"
    CHIP = "chip"
    NETWORK = "network"
    SYSTEM = "system"
    SOFTWARE = "software"
    MODEL = "model"
    SETTING = "setting"


AS_IT_WAS = (Condition.KNOWN, Condition.NEW_CHIP)  # all was used that is known of the run


class Quantity(StrEnum):
    """The quantity that a residual compares."""

    TIME = "time"
    ALLOCATED = "allocated"
    ACTIVE = "active"
    RESERVED = "reserved"


@dataclass(frozen=True)
class Residual:
    """One figure of one published run and its prediction, in the publication's unit: a row of
    `residuals.csv`.

    ci/measure_residuals.py writes the file. A residual is ln(measured / predicted): of the step time (above
    0: slower than predicted), or of a peak of memory. Rows of one `source` come from the same people and
    software, and share errors; a whole source is held out.
    """

    condition: Condition
    source: str
    chip: str
    run: str
    model: str
    """Its name, and the fields of its shape."""
    family: str
    system: str
    software: str
    fitted: bool
    """Constants were fitted to this source."""
    compiled: bool
    gpus: int
    nodes: int
    network: str
    retries: float
    """The allocator's retries a step, as predicted."""
    full: float
    """Predicted peak of reserved memory as a share of what the allocator can have."""
    network_share: float
    """Durations of collectives between nodes, alone, over that of the step, as predicted."""
    quantity: Quantity
    unit: str
    published: float
    predicted: float
    log_ratio: float

    @property
    def group(self) -> tuple[str, str, str]:
        """Return (source, chip, family): runs of one group share errors of their prediction."""
        return (self.source, self.chip, self.family)

    @property
    def needed(self) -> float:
        """Return the width, before the network's part, with which the run is just inside its interval."""
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
"""|ln(ratio)| of two steps of a model and machine that cannot be distinguished, if no more is known of their
difference: how far residuals of a model's runs are apart (`ci/measure_differences.py`)."""
_FEW_RUNS = 5
_FEW_GROUPS = 4
MORE_GPUS = "more than 512 GPUs, where published runs disagree"
# Relative to its own few nodes, a study of GPTs (MareNostrum 5) is within 12 % of the simulation up to 512
# GPUs. Of its runs on 1,024 and 2,048 GPUs some are too, others take 1.2 to 1.5 times as long as those.
_AGREED_GPUS = 512
_MISSED_A_DOUBLING = 0.21
# The share of a node's data sheet that rings reach: 0.98 (llm-foundry's H100s), 0.75 (its A100s; MareNostrum
# 5 on 512 GPUs), 0.24 (Leonardo). Profiles have 0.75 and more. On Leonardo a run on 128 GPUs comes out if its
# collectives, with their latency, take 2.3 times as long as simulated.
_SLOWER = 2.5
_HIDDEN = 0.72
"""The share of a step that collectives may take before they lengthen it: 32 GPTs, simulated on networks that
are two and three times slower."""
OTHER_KIND = 0.26
"""The least |ln| of a memory peak's width for models and settings that no published run has: 16 peaks of five
sources that set nothing (`ci/measured/memory_kinds.txt`)."""
COMPOSED = 0.13
"""ln of how much longer an eager step takes with RMSNorms and rotary embeddings composed of operators
(docs/validation.md), where a user does not say how they are written."""
NAMED = 0.1
"""From which on what was not measured is named."""


class Unknown(StrEnum):
    """A reason for a wider interval, in words for people."""

    CHIP = "no published run on this chip"
    NETWORK = "network between nodes not stated"
    SYSTEM = "no published run of this system"
    SOFTWARE = "no published run of this software"
    MODEL = "no published run of this kind of model, optimizer and dtype is known in full"
    SETTING = "few published runs have settings like these"
    OFFLOAD = "no published run offloads activations"
    NORMS = "RMSNorms may be composed of operators, 10 to 14 % slower on H100: --set norm=composed or fused"
    LINK = "bandwidth to the host not measured with all GPUs of a node: fsdpbench calibrate narrows it"
    ATTENTION = "no published rates of this kernel of attention on this chip"
    PCIE = "links inside a node are PCIe, whose rates differ between machines: fsdpbench calibrate narrows it"
    UNMEASURED = "network between nodes not measured: fsdpbench calibrate --nccl-tests narrows it"
    COMPILED = "no compiled run could be compared"
    MEMORY = "memory is full: the allocator retries"
    NEARLY_FULL = "memory is nearly full"


@dataclass(frozen=True)
class Width:
    """Half an interval's width, as |ln(measured / predicted)|, and why it is wider than that of known runs.

    `runs`: residuals of known runs that it rests on. `network`: by how much a time may be longer, and not
    shorter, for what is not known of the network.
    """

    log: float
    because: tuple[Unknown, ...]
    runs: int
    network: float = 0.0

    def around(self, value: float) -> tuple[float, float]:
        """Return the interval of a figure predicted as `value`."""
        return value * math.exp(-self.log), value * math.exp(math.hypot(self.log, self.network))

    def covers(self, log_ratio: float) -> bool:
        """Return whether ln(measured / predicted) is inside."""
        return -self.log <= log_ratio <= math.hypot(self.log, self.network)

    @property
    def half(self) -> float:
        """Return half the interval as a share of its middle."""
        low, high = self.around(1.0)
        return (high - low) / (high + low)

    def with_network(self, share: float, gpus: int, measured: bool = False) -> "Width":
        """Return the width of a time on so many GPUs, of which collectives between nodes are a `share`."""
        network = by_network(0.0 if measured else share, gpus)
        named = (Unknown.UNMEASURED,) if by_network(share, 1) > NAMED and not measured else ()
        return dataclasses.replace(self, network=network, because=(*self.because, *named))


def by_network(share: float, gpus: int) -> float:
    """Return ln of how much longer a step may be for a network that was not measured, or on more GPUs than
    published runs had; `share`: of collectives between nodes in it, alone."""
    beyond = math.log2(max(1.0, gpus / _AGREED_GPUS))
    longer = math.log1p(max(0.0, _SLOWER * share - max(share, _HIDDEN)))
    return math.hypot(longer, _MISSED_A_DOUBLING * beyond)


_SAVED_BY_LINKS = 0.9
"""The share of collectives over PCIe that another machine saves: eight L40S without peer access between their
sockets reached 2.2 GB/s, PCIe 4.0 carries ten times that."""


def by_faster_links(share: float, kernels: float) -> float:
    """Return |ln| of how much shorter a step may be on another machine's PCIe. `share`, `kernels`: of the
    step, collectives over it, alone, and kernels, which stay."""
    return -math.log(min(1.0, max(1 - _SAVED_BY_LINKS * min(share, 1.0), kernels)))


# Packaged profiles have three quarters of what PCIe carries. One H100 and one H200 reached 4 and 11 % more,
# alone (ci/measured/gpu); of all in a node each may reach half: two share a DGX A100's switch (from memory).
_FASTER_LINK, _NEAR_LINK = 1.1, 0.1


def by_link(step: float, slow: float, measured: bool) -> tuple[float, float]:
    """Return |ln| of how much shorter and longer a step may be for the link to the host; `slow`: with copies
    that take twice as long. The longest of many sums of durations, a step is convex in the time of a copy: x
    of that time more adds at most x of what all of it adds, and less saves no more. `measured`: to 10 %."""
    more = max(0.0, slow / step - 1)
    saved = min(more * (1 - 1 / _FASTER_LINK), 1 / 2)
    return -math.log1p(-saved), math.log1p(more * (_NEAR_LINK if measured else 1))


def is_beyond(gpus: int) -> bool:
    """Return whether published runs of so many GPUs disagree."""
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

    Compiled runs have a width of their own where any could be compared.
    """
    # The packaged table is None here: to hash its rows for the cache would take longer than the rest.
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
    """Return the share of the memory above which a predicted peak's interval may end at all of it."""
    rows = read_table() if table is None else table
    reserved = [row for row in rows if row.quantity is Quantity.RESERVED and is_held_out(row)]
    return math.exp(-_safe_quantile(reserved))


def is_held_out(row: Residual) -> bool:
    """Return whether the row is a residual of known software on known chips."""
    return _is_known(row) and not row.fitted


def _is_known(row: Residual) -> bool:
    return row.condition is Condition.KNOWN and not row.retries


def _tells(row: Residual, aspect: Unknown, edge: float) -> bool:
    """Return whether `row` is evidence for the width of `aspect`."""
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
    """Return `weighted_quantile`, widened for how few groups there are."""
    groups = len({row.group for row in rows})
    factor = 1.0 if groups < _FEW_GROUPS else widening(groups)
    return weighted_quantile(rows) * factor


def _worst_source(rows: Sequence[Residual]) -> float:
    """Return the widest quantile of one source's eager runs, widened for how few there are: of less than ten
    sources, the worst is what nine in ten new ones do not exceed; 0 with more. Fitted sources count, since
    fitting only lessens errors."""
    by_source: dict[str, list[float]] = {}
    for row in rows:
        if not row.compiled:
            by_source.setdefault(row.source, []).append(row.needed)
    if len(by_source) >= 1 / (1 - LEVEL):
        return 0.0
    own = [sorted(each) for each in by_source.values() if len(each) >= _FEW_RUNS]
    return max((each[math.ceil(LEVEL * len(each)) - 1] * widening(len(each)) for each in own), default=0.0)


def widening(groups: int) -> float:
    """Return Student's t with `groups` - 1 degrees of freedom over the normal quantile, two-sided at `LEVEL`
    (Cornish-Fisher's expansion, within 1 % from 3 degrees on)."""
    z, freedom = NormalDist().inv_cdf((1 + LEVEL) / 2), groups - 1
    return (
        1
        + (z**2 + 1) / (4 * freedom)
        + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)
        + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * freedom**3)
    )


def weighted_quantile(rows: Sequence[Residual], level: float = LEVEL) -> float:
    """Return the least width that covers `level` of the rows, groups weighted equally; 0 without rows.

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
