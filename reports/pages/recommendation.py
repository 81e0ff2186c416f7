"""The recommendation in three lines, the findings behind it with their figures, code to copy, and the chart
that explains the verdict."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpbench.base.errors import error_text
from fsdpbench.base.reading import UnreadableError, read_bytes
from fsdpbench.reports.pages import display, ranking
from fsdpbench.reports.pages.comparisons import differences
from fsdpbench.reports.pages.effects import WORTH_SAYING, Effect, effects
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.pages.whole_run import Chart, breakdown
from fsdpbench.reports.result import WIDE, Interval

_MOST_SETTINGS = 6
_ALWAYS = ("batch", "activation_checkpointing")
MOST_BARS = 7
_MOST_CODE = 20_000


@dataclass(frozen=True, slots=True)
class Code:
    """A text to copy, and its name."""

    name: str
    text: str


def overview_chart(view: RunView, ranked: Sequence[ranking.Ranked], metric: ranking.Metric) -> Chart | None:
    """Return the step of the best row beside the rows it is compared with: the best of each other system, the
    first one tried, and the slowest."""
    timed = [entry for entry in ranked if entry.throughput and entry.row.result.time_s]
    if not timed:
        return None
    systems: dict[str, ranking.Ranked] = {}
    best = ranking.chosen(timed)
    for entry in (*filter(None, (best.torchs, best.ours)), *timed):
        systems.setdefault(str(entry.row.settings.get("system")), entry)
    chosen = [timed[0], *systems.values()][: MOST_BARS - 2]
    chosen += [entry for entry in timed if entry.row.folder.name == view.first_point] + [timed[-1]]
    places = {entry.place for entry in chosen}
    shown = [entry for entry in timed if entry.place in places]
    chart = breakdown(shown, ranking.varying_settings([entry.row for entry in shown]), metric)
    if chart is None:
        return None
    return replace(chart, name="overview", layout=chart.layout | {"height": 112 + 24 * len(places)})


def code_to_copy(view: RunView, command: str | None) -> list[Code]:
    """Return the best settings as code, if the sweep left it in its folder, and the command of the best."""
    found = []
    for path in sorted(view.folder.glob("best_*.py"), reverse=True)[:4]:  # torch's before ours
        try:
            found.append(Code(path.name, read_bytes(path, _MOST_CODE).decode("utf-8", "replace")))
        except (UnreadableError, OSError):
            continue
    return found + ([Code("run it again", command)] if command else [])


def plus_minus(interval: Interval, step_time_s: float | None) -> str:
    """Return `±7 %`, half the interval of the step time; if it is wide, the speed's `[−58 %, +140 %]`."""
    if interval.half_width < WIDE or not step_time_s:
        return f"±{display.percent(interval.half_width, 0)}"
    low, high = (step_time_s / end - 1 for end in reversed(interval.step_time_s))
    return f"[{display.signed_percent(low)}, {display.signed_percent(high)}]"


def interval_findings(ranked: Sequence[ranking.Ranked]) -> list[str]:
    """Return a sentence about the rows whose memory is risky, if there are any."""
    known = [
        (entry.place, each) for entry in ranked if entry.throughput and (each := entry.row.result.interval)
    ]
    risky = [place for place, interval in known if interval.risky]
    if not risky:
        return []
    places = ", ".join(map(str, risky[:8])) + (" …" if len(risky) > 8 else "")
    return [
        f"{len(risky)} of {len(known)} {'is' if len(risky) == 1 else 'are'} risky: memory fits only inside "
        f"its error, or the allocator retries (number {places})."
    ]


def best_sentence(view: RunView) -> str:
    """Return the recommendation as one paragraph of plain text."""
    return " ".join(best_lines(view))


def best_lines(view: RunView) -> list[str]:
    """Return which configuration to run, what it gives and what matters most: one line each of at most 25
    words; a single line if no configuration finished."""
    ranked = ranking.rank(view)
    if not ranked:
        return ["No configuration has finished yet."]
    if not ranked[0].throughput and view.with_status(Status.RACE, Status.RANK_MISMATCH):
        return [f"No configuration ended without a fault: {endings(view.configurations)}."]
    if not ranked[0].throughput:
        return [f"None of the {len(ranked)} configurations finished: {endings(view.configurations)}."]
    found = ranking.chosen(ranked)
    best = found.torchs or found.ours or ranked[0]
    lines = [_do(best, found, ranked, view), _given(best, ranked, view)]
    if sum(entry.throughput is not None for entry in ranked) > 1:
        lines.append(_mattered([_with_interval(effect, best, ranked) for effect in effects(ranked, best)]))
    return [f"{line}." for line in lines]


def _do(best: ranking.Ranked, found: ranking.Chosen, ranked: Sequence[ranking.Ranked], view: RunView) -> str:
    """Return the first line: the configuration to run, and ours if it is clearly faster than torch's. The
    line names the varying settings that differ from the sweep's first configuration."""
    first = next((entry for entry in ranked if entry.row.folder.name == view.first_point), best)
    row, start = best.row, first.row.settings if first is not best else {}
    settings = [
        display.phrase(name, row.settings[name])
        for name in ranking.varying_settings([entry.row for entry in ranked])
        if row.settings.get(name) is not None and name not in ("system", "compile")
        if name in _ALWAYS or row.settings[name] != start.get(name)
    ]
    if len(settings) > _MOST_SETTINGS:
        settings = [*settings[:_MOST_SETTINGS], f"{len(settings) - _MOST_SETTINGS} more"]
    system = row.settings.get("system")
    name = row.name if system in (None, "script") else system
    verb = "Run" if len(ranked) > 1 else "One configuration was run:"
    line = f"{verb} {name}{' with ' * bool(settings)}{', '.join(settings)}"
    line += f"{', compiled' * bool(row.compiled or row.settings.get('compile'))}{ranking.doubt(row)}"
    ours = found.ours
    if found.gain is None or ours is None or found.gain.low <= 0:
        return line
    system, gain = ours.row.settings.get("system"), f"{found.gain}, {ranking.NOT_YET}"
    tails = (f"; or {system}{_others(ours, best, ranked)}: {gain}", f"; {system}: {gain}")
    return next((line + tail for tail in tails if len((line + tail).split()) <= display.MOST_WORDS), line)


def _others(ours: ranking.Ranked, best: ranking.Ranked, ranked: Sequence[ranking.Ranked]) -> str:
    """Return the settings in which ours differs from the recommended one; `alike` if there are none."""
    mine, its = ours.row.settings, best.row.settings
    names = [name for name in ranking.varying_settings([entry.row for entry in ranked]) if name != "system"]
    different = [display.phrase(n, mine[n]) for n in names if n in its and mine.get(n) not in (None, its[n])]
    return f" with {', '.join(different)}" if different else " alike"


def _given(best: ranking.Ranked, ranked: Sequence[ranking.Ranked], view: RunView) -> str:
    """Return the second line: the throughput of the best, and the change from the sweep's first."""
    metric, result = ranking.metric_of(view), best.row.result
    error = f" {plus_minus(result.interval, result.step_time_s)}" if result.interval else ""
    start = "Simulated, it gives" if best.row.simulated else "It gives"
    if best.row.simulated and (hardware := best.row.hardware.get("name")):
        start = f"Simulated on {hardware}, it gives"
    parts = [f"{start} {display.number(best.throughput, 4)} {metric.words}{error}"]
    figures = [f"MFU {display.percent(result.mfu)}"] if result.mfu is not None else []
    if (memory := result.reserved) is not None:
        capacity = best.row.capacity_bytes
        figures.append(f"{display.gib(memory)}{f' of {display.gib(capacity)}' if capacity else ''} GiB")
    parts.append(f" ({', '.join(figures)})" if figures else "")
    first = next((entry for entry in ranked if entry.row.folder.name == view.first_point), None)
    if first is best:
        parts.append("; it is what the sweep began with" * (len(ranked) > 1))
    elif first is not None and first.throughput:
        parts.append(f"; {ranking.paired(best, first)} against where the sweep began")
    elif first is not None:
        parts.append(f"; where the sweep began: {first.row.status.words}")
    return display.within(parts)


def _mattered(found: Sequence[Effect]) -> str:
    """Return the third line: the two settings with the largest effects, and the cost of another value."""
    strongest: dict[str, Effect] = {}
    for effect in sorted(found, key=lambda effect: effect.strength):
        unclear = effect.low is not None and effect.high is not None and effect.low <= 1.0 <= effect.high
        if effect.name != "system" and not unclear and effect.strength >= WORTH_SAYING:
            strongest[effect.name] = effect
    strong = sorted(strongest.values(), key=lambda effect: effect.strength, reverse=True)
    if not strong:
        return "No setting changed throughput clearly, by 1 % or more with the others held equal"
    words = [_effect_words(effect) for effect in strong[:2]]
    return display.within(["What matters most: " + words[0], *(f", then {each}" for each in words[1:])])


def _with_interval(effect: Effect, best: ranking.Ranked, ranked: Sequence[ranking.Ranked]) -> Effect:
    """Return an effect of a single pair with the interval of the two predictions' difference."""
    if effect.pairs != 1:
        return effect
    others = {**best.row.settings, effect.name: None}
    for entry in ranked:
        settings = entry.row.settings
        alike = {**settings, effect.name: None} == others
        if entry.throughput and alike and display.setting(settings.get(effect.name)) == effect.value:
            change = ranking.paired(entry, best)
            return replace(effect, low=1 + change.low, high=1 + change.high)
    return effect


def _effect_words(effect: Effect) -> str:
    """Return `full checkpointing instead of none: −14 % [−15, −13]`."""
    ratio = effect.ratio or 1.0
    change = ranking.Paired(ratio - 1, (effect.low or ratio) - 1, (effect.high or ratio) - 1)
    retries = " (allocator retries)" if effect.with_retries else ""
    is_flag = effect.reference in ("true", "false")
    reference = display.phrase(effect.name, effect.reference) if is_flag else effect.reference
    return f"{display.phrase(effect.name, effect.value)} instead of {reference}: {change}{retries}"


def findings(view: RunView) -> list[str]:
    """Return further sentences: ties with less memory, retries, configurations that ran out of memory."""
    ranked = ranking.rank(view)
    notes = [note for row in view.configurations if row.result.script for note in row.result.script.notes]
    found = [*(f"{note[:1].upper()}{note[1:]}." for note in dict.fromkeys(notes))]
    found += [difference.sentence for difference in differences(view)]
    found += [*interval_findings(ranked), *_retries(ranked), *_out_of_memory(view)]
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
        races = f"{_rows(len(racing), has=True)} data races (listed below)"
        found.append(f"{races}: results may be wrong on real GPUs, so none of them is recommended.")
    environments = {json.dumps(row.result.environment, sort_keys=True) for row in view.with_status(Status.OK)}
    if len(environments) > 1:
        found.append(f"The configurations come from {len(environments)} environments, listed below.")
    if view.pending:
        found.append(f"{_rows(len(view.pending), has=True)} not run yet; the same command runs the rest.")
    if view.left_out:
        found.append(f"{_rows(len(view.left_out))} of an earlier sweep in this folder left out.")
    return found


def endings(rows: Sequence[Configuration]) -> str:
    """Return `12 out of memory, 1 error`: the number of configurations by status."""
    counted = Counter(row.status for row in rows)
    return ", ".join(f"{counted[status]} {status.words}" for status in Status if counted[status])


def _rows(amount: int, *, has: bool = False) -> str:
    words = f"{amount} configuration{'' if amount == 1 else 's'}"
    return f"{words} {'has' if amount == 1 else 'have'}" if has else words


def _retries(ranked: Sequence[ranking.Ranked]) -> list[str]:
    retried = [entry for entry in ranked if (entry.row.result.alloc_retries_per_step or 0) > 0]
    if not retried:
        return []
    worst = max(retried, key=lambda entry: entry.row.result.alloc_retries_per_step or 0)
    most = f"{display.count(worst.row.result.alloc_retries_per_step)} a step (number {worst.place})"
    upto = "up to " if len(retried) > 1 else ""
    text = f"{_rows(len(retried))} had allocator retries, {upto}{most}: memory is short there"
    if (spread := worst.row.result.steps_spread) is not None:
        middle = f"the middle half spans {display.percent(spread)} there"
        text += f"; times are medians of several steps, of which {middle}"
    return [f"{text}."]


def _noise(view: RunView) -> list[str]:
    """Return sentences about chance in measured figures; simulated ones are exact."""
    measured = [row for row in view.with_status(Status.OK) if not row.simulated]
    if not measured:
        return []
    found = []
    repeated = [row.result.repeats for row in measured if row.result.repeats]
    spreads = [repeats.spread for repeats in repeated if repeats.spread is not None]
    if spreads:
        runs = max(repeats.runs for repeats in repeated)
        found.append(error_text("recommendation.spread", display.percent(max(spreads)), runs))
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
    """Return values, and pairs of values, with which all configurations (two or more) ran out of memory."""
    facts = [
        (name, value) for name in ranking.varying_settings(rows) for value in ranking.values_of(rows, name)
    ]
    having = {
        fact: {id(row) for row in rows if display.setting(row.settings.get(fact[0])) == fact[1]}
        for fact in facts
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
