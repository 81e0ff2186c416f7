"""The recommendation in three sentences, and the findings behind it, in words with their figures."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence

from fsdpbench.reports.analysis.findings import Suggestion, Verdict
from fsdpbench.reports.pages.display import count, gib, number, percent, setting, signed_percent
from fsdpbench.reports.pages.effects import WORTH_SAYING, Effect, effects
from fsdpbench.reports.pages.fusion import compile_findings
from fsdpbench.reports.pages.overview import interval_findings, plus_minus
from fsdpbench.reports.pages.ranking import (
    NEAR,
    Ranked,
    chosen,
    doubt,
    label,
    leaner_ties,
    metric_of,
    rank,
    reserved,
    values_of,
    varying_settings,
)
from fsdpbench.reports.pages.side_by_side import differences
from fsdpbench.reports.pages.view import Configuration, RunView, Status


def best_sentence(view: RunView) -> str:
    """Return which configuration to run and why, in three short sentences; plain text.

    The settings that are best for torch's FSDPs and for ours, what they reach and how far that is from the
    slowest and from the first, and which settings mattered most.
    """
    ranked = rank(view)
    if not ranked:
        return "No configuration has finished yet."
    if not ranked[0].throughput and view.with_status(Status.RACE, Status.RANK_MISMATCH):
        return f"No configuration ended without a fault: {endings(view.configurations)}."
    if not ranked[0].throughput:
        return f"None of the {len(ranked)} configurations finished: {endings(view.configurations)}."
    found = chosen(ranked)
    named = [each for each in (found.torchs, found.ours) if each] if found.both else [ranked[0]]
    finished = [entry for entry in ranked if entry.throughput]
    sentences = [_settings(named, ranked), _given(named, finished, len(ranked), view)]
    if len(finished) > 1:
        sentences.append(_mattered(effects(ranked)))
    return " ".join(f"{sentence}." for sentence in sentences)


def _settings(named: Sequence[Ranked], ranked: Sequence[Ranked]) -> str:
    """Return the first sentence: the configuration to run."""
    varying = varying_settings([entry.row for entry in ranked])
    hardware = named[0].row.hardware.get("name")
    start = f"Simulated{f' on {hardware}' if hardware else ''}: run " if named[0].row.simulated else "Run "
    labels = [label(each.row, varying) + doubt(each.row) for each in named]
    compiled = named[0].row.compiled
    if "compile" not in varying and compiled is not None:
        labels[-1] += ", compiled" if compiled else ", eager"
    return start + " or ".join(labels)


def _given(named: Sequence[Ranked], finished: Sequence[Ranked], tried: int, view: RunView) -> str:
    """Return the second sentence: the throughput that it gives."""
    metric = metric_of(view)
    best = max(named, key=lambda each: each.throughput or 0.0)
    if len(named) == 1:
        error = f" {plus_minus(best.row.result.interval)}" if best.row.result.interval else ""
        text = f"It reaches {number(best.throughput)} {metric.words}{error}{_reached(best, metric.each)}"
    else:
        text = f"They reach {' and '.join(map(_speed, named))} {metric.words}"
    if len(finished) > 1:
        text += f"; {'the faster is ' if len(named) > 1 else ''}"
        text += _against(best, finished, tried, view.first_point)
    return text


def _speed(each: Ranked) -> str:
    """Return `11,027 ±9 % (MFU 63.2 %, 72.4 GiB)`."""
    result, held = each.row.result, reserved(each.row)
    figures = [f"MFU {percent(result.mfu)}"] if result.mfu is not None else []
    figures += [f"{gib(held)} GiB"] if held is not None else []
    error = f" {plus_minus(result.interval)}" if result.interval else ""
    return f"{number(each.throughput)}{error}" + (f" ({', '.join(figures)})" if figures else "")


def findings(view: RunView) -> list[str]:
    """Return further sentences: ties with less memory, retries, configurations that ran out of memory."""
    ranked = rank(view)
    found = [difference.sentence for difference in differences(view)]
    found += [
        *interval_findings(ranked),
        *_ties(ranked),
        *compile_findings(view, ranked),
        *_exposure(ranked),
        *_retries(ranked),
        *_out_of_memory(view),
    ]
    broken = view.with_status(Status.ERROR, Status.CRASH, Status.TIMEOUT, Status.UNREADABLE)
    if broken:
        found.append(f"{_rows(len(broken))} gave no figures: {endings(broken)}; each row says why.")
    doubtful = [row for row in view.with_status(Status.OK) if row.problem]
    if doubtful:
        found.append(f"{_rows(len(doubtful))} cannot be believed: {doubtful[0].name}: {doubtful[0].problem}.")
    found += _noise(view)
    differing = view.with_status(Status.RANK_MISMATCH)
    if differing:
        found.append(f"The ranks of {_rows(len(differing))} call different collectives (listed below).")
    racing = view.with_status(Status.RACE)
    if racing:
        has = "has" if len(racing) == 1 else "have"
        found.append(
            f"{_rows(len(racing))} {has} data races (listed below): results may be wrong on real GPUs, so "
            "none of them is recommended."
        )
    environments = {json.dumps(row.result.environment, sort_keys=True) for row in view.with_status(Status.OK)}
    if len(environments) > 1:
        found.append(f"The configurations come from {len(environments)} environments, listed below.")
    if view.pending:
        has = "has" if len(view.pending) == 1 else "have"
        found.append(f"{_rows(len(view.pending))} {has} not run yet; the same command runs the rest.")
    if view.left_out:
        found.append(f"{_rows(len(view.left_out))} of an earlier sweep in this folder left out.")
    return found


def advice(verdict: Verdict | None, found: Sequence[Effect]) -> list[str]:
    """Return the trace's verdict, a sentence a cause, with this run's effects of the settings to try."""
    if verdict is None:
        return []
    if not verdict.findings:
        return [verdict.sentence]
    return [finding.text + _tried_here(finding.suggestions, found) for finding in verdict.findings]


def _tried_here(suggestions: Sequence[Suggestion], found: Sequence[Effect]) -> str:
    """Return the effects that this run measured for the suggested values, as a sentence; or nothing."""
    known = {(effect.name, effect.value): effect for effect in found}
    tried = [known[key] for each in suggestions if (key := (each.setting, each.value)) in known]
    words = [f"{effect.name}={effect.value} {_changed(effect)}" for effect in tried]
    return f" In this run {' and '.join(words)}." if words else ""


def _changed(effect: Effect) -> str:
    if effect.ratio is None:
        return "ran out of memory"
    return f"changes throughput by {signed_percent(effect.ratio - 1)}"


def endings(rows: Sequence[Configuration]) -> str:
    """Return `12 out of memory, 1 error`: how many configurations ended in which way."""
    counted = Counter(row.status for row in rows)
    return ", ".join(f"{counted[status]} {status.words}" for status in Status if counted[status])


def _reached(best: Ranked, each: str) -> str:
    """Return the figures in parentheses behind the best throughput."""
    result = best.row.result
    parts = []
    if result.tflops_per_gpu is not None:
        parts.append(f"{number(result.tflops_per_gpu)} TFLOPS/{each}")
    if result.mfu is not None:
        parts.append(f"MFU {percent(result.mfu)}")
    if (memory := reserved(best.row)) is not None:
        capacity = best.row.capacity_bytes
        parts.append(f"{gib(memory)}{f' of {gib(capacity)}' if capacity else ''} GiB reserved")
    return f" ({', '.join(parts)})" if parts else ""


_FIRST = "the first one tried (the first value of each setting)"


def _against(best: Ranked, finished: Sequence[Ranked], tried: int, first_point: str | None) -> str:
    """Return how far the best is from the slowest, and from the space's first point, where people start."""
    slowest = finished[-1]
    words = (
        f"{_times((best.throughput or 0.0) / (slowest.throughput or 1.0))} the slowest of the {len(finished)}"
    )
    words += f" that finished ({tried} tried)"
    first = next((entry for entry in finished if entry.row.folder.name == first_point), None)
    if first is best:
        return f"{words} and {_FIRST}"
    if first is None or first is slowest:
        return words
    return f"{words} and {_times((best.throughput or 0.0) / (first.throughput or 1.0))} {_FIRST}"


def _times(ratio: float) -> str:
    if ratio < 1 + WORTH_SAYING:
        return "as fast as"
    return f"{signed_percent(ratio - 1)} over" if ratio < 1.95 else f"{number(ratio, 2)} times"


def _mattered(found: Sequence[Effect]) -> str:
    """Return the two settings with the largest effects and what leaving the best value costs."""
    strongest: dict[str, Effect] = {}
    for effect in found:
        held = strongest.get(effect.name)
        if effect.ratio and (held is None or effect.strength > held.strength):
            strongest[effect.name] = effect
    strong = [effect for effect in strongest.values() if effect.strength >= WORTH_SAYING]
    strong.sort(key=lambda effect: effect.strength, reverse=True)
    if not strong:
        return "No setting changed throughput by 1 % with the others held equal"
    return "What mattered most: " + ", then ".join(_effect_words(effect) for effect in strong[:2])


def _effect_words(effect: Effect) -> str:
    pairs = f"{effect.pairs} pair{'s' if effect.pairs > 1 else ''}"
    change, interval = signed_percent((effect.ratio or 1.0) - 1), ""
    if effect.low is not None and effect.high is not None:
        low, high = signed_percent(effect.low - 1), signed_percent(effect.high - 1)
        interval = f", between {low} and {high}" if low != high else ""
    retries = ""
    if effect.with_retries:
        retries = " with allocator retries"
    elif effect.other_pairs and effect.other_ratio:
        rest = signed_percent(effect.other_ratio - 1)
        retries = f" without allocator retries; {rest} over {effect.other_pairs} with them"
    return (
        f"{effect.name} ({effect.value} instead of {effect.reference}: {change}{interval}, {pairs}{retries})"
    )


def _rows(amount: int) -> str:
    return f"{amount} configuration{'' if amount == 1 else 's'}"


def _ties(ranked: Sequence[Ranked]) -> list[str]:
    near = [entry for entry in ranked[1:] if entry.of_best and entry.of_best >= 1 - NEAR]
    if not near:
        return []
    text = f"{_rows(len(near))} {'is' if len(near) == 1 else 'are'} within 1 % of the best"
    lean = leaner_ties(ranked)
    if lean:
        saved = (reserved(ranked[0].row) or 0.0) - (reserved(lean[0].row) or 0.0)
        varying = varying_settings([entry.row for entry in ranked])
        name = f"number {lean[0].place} ({label(lean[0].row, varying)})"
        text += f"; the leanest of them, {name}, reserves {gib(saved)} GiB less"
    return [text + "."]


def _exposure(ranked: Sequence[Ranked]) -> list[str]:
    """Return where the best configuration's step goes that is not computation."""
    parts = ranked[0].row.result.time_s if ranked and ranked[0].throughput else None
    if parts is None:
        return []
    step = parts.compute_only + parts.overlapped + parts.exposed_communication + parts.idle
    if not step > 0:
        return []
    overlap = ranked[0].row.result.overlap_fraction
    hidden = f" ({percent(overlap)} of communication is hidden)" if overlap is not None else ""
    return [
        f"In the best configuration {percent(parts.exposed_communication / step)} of the traced step waits "
        f"for communication{hidden} and {percent(parts.idle / step)} is idle."
    ]


def _retries(ranked: Sequence[Ranked]) -> list[str]:
    retried = [entry for entry in ranked if (entry.row.result.alloc_retries_per_step or 0) > 0]
    if not retried:
        return []
    worst = max(retried, key=lambda entry: entry.row.result.alloc_retries_per_step or 0)
    most = f"{count(worst.row.result.alloc_retries_per_step)} a step (number {worst.place})"
    upto = "up to " if len(retried) > 1 else ""
    text = f"{_rows(len(retried))} had allocator retries, {upto}{most}: memory is short there"
    if (spread := worst.row.result.steps_spread) is not None:
        text += (
            f"; times are medians of several steps, of which the middle half spans {percent(spread)} there"
        )
    return [f"{text}."]


def _noise(view: RunView) -> list[str]:
    """Return a sentence on chance in measured figures; simulated ones are exact."""
    measured = [row for row in view.with_status(Status.OK) if not row.simulated]
    if not measured:
        return []
    found = []
    repeated = [row.result.repeats for row in measured if row.result.repeats]
    spreads = [repeats.spread for repeats in repeated if repeats.spread is not None]
    if spreads:
        runs = max(repeats.runs for repeats in repeated)
        found.append(
            f"Step times of the same configuration spread by up to {percent(max(spreads))} over {runs} runs: "
            "smaller differences mean little."
        )
    else:
        found.append("Each configuration ran once: how much runs differ by chance is not known.")
    unsettled = sum(
        row.result.measured is not None and row.result.measured.warmup_stable is False for row in measured
    )
    if unsettled:
        found.append(f"{_rows(unsettled)} had not settled after the warm-up.")
    return found


def _out_of_memory(view: RunView) -> list[str]:
    out = view.with_status(Status.OOM)
    if not out:
        return []
    causes = _always_out_of_memory(view.configurations)
    common = f"; always with {', and always with '.join(causes)}" if causes else ""
    return [f"{_rows(len(out))} ran out of memory{common}."]


def _always_out_of_memory(rows: Sequence[Configuration]) -> list[str]:
    """Return values, and pairs of values, with which every configuration (at least two) ran out of memory."""
    facts = [(name, value) for name in varying_settings(rows) for value in values_of(rows, name)]
    having = {
        fact: {id(row) for row in rows if setting(row.settings.get(fact[0])) == fact[1]} for fact in facts
    }
    out = {id(row) for row in rows if row.status is Status.OOM}
    explained: set[int] = set()
    causes = []
    groups = [*((fact,) for fact in facts), *itertools.combinations(facts, 2)]
    for group in groups:
        rows_of = set.intersection(*(having[fact] for fact in group))
        if len(rows_of) > 1 and rows_of <= out and not rows_of <= explained:
            explained |= rows_of
            causes.append(" and ".join(f"{name}={value}" for name, value in group))
    return causes[:3]
