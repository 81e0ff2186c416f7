"""Verdicts on traces: what costs most, and which setting to try next.

Each rule examines one cause, returns a finding if the cause costs at least `WORTH` of the step, and reports
what it saw.  A predicted gain is an upper bound: the time saved if the cause vanished altogether.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from fsdpbench.reports.analysis.idle import IDLE_WORDS
from fsdpbench.reports.analysis.lateness import GatherTiming, LateCause
from fsdpbench.reports.analysis.model import Finding, Outcome, RankAnalysis, Suggestion, Verdict, remedies
from fsdpbench.reports.analysis.naming import PATTERNS
from fsdpbench.reports.analysis.units import ROOT_UNIT

WORTH = 0.03
"""Share of the step from which a cause is reported."""
CPU_BOUND = 0.10
"""Share of the step spent waiting for the CPU from which it counts as CPU-bound: step edges always wait."""

_REDUCTIONS = ("reduce_scatter", "all_reduce")
_TEXTS = PATTERNS["findings"]


def judge_rank(rank: RankAnalysis) -> Verdict:
    """Return the verdict on one rank's trace."""
    if not rank.trusted:
        return Verdict(Outcome.CANNOT_TELL, f"Cannot tell, because {rank.warnings[0]}.")
    if not rank.time.total:
        return Verdict(Outcome.CANNOT_TELL, "Cannot tell, because the trace's steps have no length.")
    found = [finding for rule in _RULES for finding in rule(rank) if finding.share >= WORTH]
    idle = largest_idle(rank, found)
    found += [idle] if idle is not None else []
    found.sort(key=lambda finding: finding.share, reverse=True)
    exposed = rank.time.exposed_communication / rank.time.total
    if found:
        return Verdict(Outcome.FOUND, found[0].text, tuple(found))
    return Verdict(Outcome.FINE, _fine(rank, exposed))


def _fine(rank: RankAnalysis, exposed: float) -> str:
    computing = (rank.time.compute_only + rank.time.overlapped) / rank.time.total
    idle = rank.time.idle / rank.time.total
    worker = "device" if rank.kind == "gpu" else "CPU"
    what = f"The {worker} computes {_percent(computing)} of the step"
    if idle >= CPU_BOUND:
        what += f" and idles {_percent(idle)}{'' if rank.kind == 'gpu' else ', between operators'}"
    if not rank.time.overlapped and not rank.time.exposed_communication:
        return f"{what}; nothing is communicated, so no FSDP setting can make it faster."
    return (
        f"{what}; hiding communication better can gain no more than the {_percent(exposed)} that is exposed."
    )


def _late_gathers(rank: RankAnalysis) -> Iterable[Finding]:
    """Yield one finding for each cause and phase of late all-gathers."""
    groups: dict[tuple[LateCause, str | None], list[GatherTiming]] = {}
    for gather in rank.gathers:
        # With a single unit, `_root_only` explains more than "the first of its step".
        if gather.cause is not None and not (_is_root_only(rank) and gather.cause is LateCause.FIRST):
            groups.setdefault((gather.cause, gather.phase), []).append(gather)
    for (cause, phase), gathers in groups.items():
        late = sum(gather.late for gather in gathers)
        share = late / rank.time.total
        of_what, base = "the step", rank.time.total
        if phase in rank.phases and rank.phases[phase].total:
            of_what, base = phase, rank.phases[phase].total
        at_turn = cause is LateCause.NO_PREFETCH and phase == "backward"
        known_as = f"{cause}_{phase}" if at_turn else str(cause)
        behind = _most_frequent(gather.behind for gather in gathers)
        words = PATTERNS["late_all_gathers"][known_as].format(behind=f" behind {behind}" if behind else "")
        yield _saving(
            str(cause) + (f"_{phase}" if phase else ""),
            share,
            f"{_percent(late / base)} of {of_what} waits for all-gathers of {_pattern(gathers)} that {words}",
            remedies(known_as),
        )


def _root_only(rank: RankAnalysis) -> Iterable[Finding]:
    """Yield a finding if all units are roots: no other unit can hide their collectives."""
    if _is_root_only(rank):
        # A unit gathers once per phase: two in a row belong to two units, whose annotations do not name them.
        turns = pairwise((each.step, each.phase) for each in rank.gathers)
        several = "backward" in rank.phases and any(one == other for one, other in turns)
        share = rank.time.exposed_communication / rank.time.total
        cause = "several_roots" if several else "root_only"
        yield _saving(cause, share, _TEXTS[cause].format(share=_percent(share)), remedies(cause))


def _is_root_only(rank: RankAnalysis) -> bool:
    return {unit.unit for unit in rank.units} == {ROOT_UNIT}


def _reductions(rank: RankAnalysis) -> Iterable[Finding]:
    """Yield exposed gradient reductions, unless another finding covers them."""
    if _is_root_only(rank) or any(
        gather.cause is LateCause.NO_PREFETCH and gather.phase == "backward" for gather in rank.gathers
    ):
        return
    for kind in _REDUCTIONS:
        exposed = _exposed(rank, kind) - _of_no_unit(rank, kind)
        if not exposed:
            continue
        share = exposed / rank.time.total
        yield _saving(
            f"exposed_{kind}",
            share,
            _TEXTS["exposed_reduction"].format(share=_percent(share), kind=kind.replace("_", "-")),
            remedies("exposed_reduction"),
        )


def _between_layers(rank: RankAnalysis) -> Iterable[Finding]:
    """Yield gathers and reductions outside of FSDP units: activations, if ranks share layers."""
    by_kind = {kind: _of_no_unit(rank, kind) for kind in ("all_gather", *_REDUCTIONS)}
    share = sum(by_kind.values()) / rank.time.total
    suggestions = remedies("exposed_between_layers")
    named = " and ".join(kind.replace("_", "-") for kind, exposed in by_kind.items() if exposed)
    places = {"share": _percent(share), "kinds": named, "settings": _settings(suggestions)}
    text = _TEXTS["exposed_between_layers"].format(**places)
    yield Finding("exposed_between_layers", share, share, text, suggestions)


def _exposed(rank: RankAnalysis, kind: str) -> int:
    figures = rank.communication.get(kind)
    return 0 if figures is None else figures.exposed


def _of_no_unit(rank: RankAnalysis, kind: str) -> int:
    """Return the ns that computation waits for collectives outside of FSDP units; 0 if no unit is known."""
    of_units = [unit.communication[kind].exposed for unit in rank.units if kind in unit.communication]
    return max(_exposed(rank, kind) - sum(of_units), 0) if of_units else 0


def _unexplained(rank: RankAnalysis) -> Iterable[Finding]:
    """Yield collectives that no other rule covers: other types, and all-gathers without FSDP annotations."""
    for kind, figures in rank.communication.items():
        if kind in _REDUCTIONS or (kind == "all_gather" and rank.units):
            continue
        share = figures.exposed / rank.time.total
        why = (
            "of an unknown unit, because the trace has no FSDP annotations"
            if kind == "all_gather"
            else "which no FSDP setting moves"
        )
        name = kind.replace("_", "-")
        yield Finding(
            f"exposed_{kind}", share, None, f"{_percent(share)} of the step waits for {name}, {why}."
        )


def _retries(rank: RankAnalysis) -> Iterable[Finding]:
    """Yield allocator retries: they free all cached blocks and wait for the device, so few cost much."""
    memory = rank.memory
    if not memory.retries:
        return
    stood_still = sum(retry.cost or 0 for retry in memory.retries)
    share = max(memory.allocator_time, stood_still) / rank.time.total
    per_step = len(memory.retries) / max(len(rank.steps), 1)
    times = "once" if per_step == 1 else f"{per_step:.3g} times"
    where = _most_frequent(retry.phase for retry in memory.retries)
    suggestions = remedies("alloc_retries")
    places = {"times": times, "where": f", mostly in {where}" if where else "", "share": _percent(share)}
    text = _TEXTS["alloc_retries"].format(**places, settings=_settings(suggestions))
    yield Finding("alloc_retries", max(share, WORTH), share or None, text, suggestions)


def _cpu_bound(rank: RankAnalysis) -> Iterable[Finding]:
    waiting = rank.idle_causes.cpu
    if waiting is None or waiting < CPU_BOUND * rank.time.total or rank.memory.retries:
        return
    share = waiting / rank.time.total
    stepping = rank.phases["optimizer"].idle if "optimizer" in rank.phases else 0
    if stepping > waiting / 2 and _goes_to_the_host_and_back(*_host_copies(rank)):
        text = _TEXTS["host_optimizer"].format(share=_percent(share := stepping / rank.time.total))
        yield _saving("host_optimizer", share, text, remedies("memory_copies"))
        return
    suggestions = (each for each in remedies("cpu_bound") if not (rank.fused and each.setting == "compile"))
    text = _TEXTS["cpu_bound"].format(share=_percent(share))
    yield _saving("cpu_bound", share, text, tuple(suggestions))


_TO_HOST = re.compile(r"DtoH|CopyDeviceToHost")
_FROM_HOST = re.compile(r"HtoD|CopyHostToDevice")


def _copies(rank: RankAnalysis) -> Iterable[Finding]:
    """Yield copies that run alone; only copies to the host and back can be offloaded shards."""
    share = rank.time.memory_copy / rank.time.total
    there, back = _host_copies(rank)
    both = _goes_to_the_host_and_back(there, back)
    suggestions = remedies("memory_copies") if both else ()
    where, remedy = "on the device", "no FSDP setting moves them"
    if both:
        where, remedy = "to the host and back", f"keep it on the device ({_settings(suggestions)})"
    elif there or back:
        where, remedy = ("from the host", "copy from pinned memory, before the data are needed")
        where, remedy = ("to the host", "copy less often") if there > back else (where, remedy)
    text = _TEXTS["memory_copies"].format(share=_percent(share), where=where, remedy=remedy)
    yield Finding("memory_copies", share, share, text, suggestions)


def _host_copies(rank: RankAnalysis) -> tuple[int, int]:
    """Return the durations of copies to and from the host, in ns."""
    there, back = (
        sum(each.time for each in rank.names if copies.search(each.name)) for copies in (_TO_HOST, _FROM_HOST)
    )
    return there, back


def _goes_to_the_host_and_back(there: int, back: int) -> bool:
    return 4 * min(there, back) > there + back


_RULES: tuple[Callable[[RankAnalysis], Iterable[Finding]], ...] = (
    _retries,
    _late_gathers,
    _root_only,
    _reductions,
    _between_layers,
    _unexplained,
    _copies,
    _cpu_bound,
)


def _saving(cause: str, share: float, text: str, suggestions: tuple[Suggestion, ...]) -> Finding:
    """Return a finding whose suggestions may save at most its share of the step."""
    gain, how = f"predicted gain at most {_percent(share)} of the step.", _settings(suggestions)
    return Finding(cause, share, share, f"{text}{f' ({how})' if how else ''}; {gain}", suggestions)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _settings(suggestions: Sequence[Suggestion]) -> str:
    return ", ".join(f"{each.setting}={each.value}" for each in suggestions)


def _pattern(gathers: Sequence[GatherTiming]) -> str:
    """Return `blocks.*` for several of `blocks.0`, `blocks.1`, ...; at most three patterns."""
    units = list(dict.fromkeys(gather.unit for gather in gathers))
    stems: dict[str, list[str]] = {}
    for unit in units:
        stems.setdefault(re.sub(r"\d+", "*", unit), []).append(unit)
    names = [f"`{stem if len(members) > 1 else members[0]}`" for stem, members in stems.items()]
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


def _most_frequent(values: Iterable[str | None]) -> str | None:
    """Return the most frequent known value; units that differ in their numbers count as one."""
    counts = Counter(re.sub(r"\d+", "*", value) for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None


_EXPLAINED = 0.5
"""Share of the idle time from which a finding explains it."""
_WORTH_NAMING = 0.1


def largest_idle(rank: RankAnalysis, found: Sequence[Finding]) -> Finding | None:
    """Return a finding if the device idles more than it computes or waits for communication."""
    time = rank.time
    if rank.kind != "gpu" or time.idle < max(time.compute_only + time.overlapped, time.exposed_communication):
        return None
    if any(finding.share >= _EXPLAINED * time.idle / time.total for finding in found):
        return None
    share = time.idle / time.total
    text = f"{100 * share:.0f} % of the time the GPU is idle{_why(rank)}."
    return Finding("idle", share, None, text)


def _why(rank: RankAnalysis) -> str:
    causes = rank.idle_causes.parts()
    if not causes and not rank.cpu_seen:
        return ", CPU not seen: the trace has no launches that would tell why (record ProfilerActivity.CPU)"
    if not causes:
        return ", and the reason is unknown: not all launches are in the trace"
    causes_text = [
        f"{IDLE_WORDS[name]} ({100 * ns / rank.time.total:.0f} %)"
        for name, ns in sorted(causes.items(), key=lambda pair: -pair[1])
        if ns >= _WORTH_NAMING * rank.time.idle
    ]
    return f": {', '.join(causes_text)}" if causes_text else ""
