"""The page of `analyze`: traces of any origin, drawn by `draw_rank`, in one offline HTML file."""

from collections.abc import Sequence
from pathlib import Path

from fsdpbench.reports.analysis import Analysis, RankAnalysis
from fsdpbench.reports.analysis.model import in_torch
from fsdpbench.reports.analysis.snapshots import SnapshotAnalysis
from fsdpbench.reports.analysis.text import across
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.shell import ASSETS, write_page
from fsdpbench.reports.pages.trace_parts import part_cells, trace_parts
from fsdpbench.reports.pages.whole_run import PARTS, Chart, Table, chart_text, part_bars, part_layout
from fsdpbench.reports.readers import Trace

_MOST_NAMES = 3
_MOST_HOLDERS = 20


def write_trace_page(analysis: Analysis, target: Path, title: str) -> Path:
    """Write the page of traces and snapshots to `target`, whole or not at all. Raises OSError."""
    ranks = list(analysis.ranks)
    names = [_name(rank, analysis) for rank in ranks]
    return write_page(
        target,
        f"{ASSETS}/trace.html.jinja",
        title=title,
        simulated=_simulated(ranks),
        facts=_facts(ranks),
        sentence=_sentence(ranks),
        doubts=[
            f"{name} is not to be trusted: {rank.warnings[0]}."
            for name, rank in zip(names, ranks, strict=True)
            if not rank.trusted and rank.warnings
        ][:8],
        tiles=_tiles(ranks[0]) if ranks else [],
        chart=time_chart(ranks, names),
        findings=_findings(ranks),
        torch=list(dict.fromkeys(w for rank in ranks if rank.verdict for w in in_torch(rank.verdict))),
        across=_across(analysis),
        details=[
            {"folder": f"rank-{number}", "words": name, "content": _content(rank)}
            for number, (name, rank) in enumerate(zip(names, ranks, strict=True))
        ],
        snapshots=[_snapshot(snapshot) for snapshot in analysis.snapshots],
        problems=[f"{problem.path}: {problem.reason}" for problem in analysis.problems],
    )


def _name(rank: RankAnalysis, analysis: Analysis) -> str:
    place = f"{rank.configuration}, " if rank.configuration else ""
    same = sum(o.rank == rank.rank and o.configuration == rank.configuration for o in analysis.ranks)
    return f"{place}rank {rank.rank}" + (f" ({rank.path.name})" if same > 1 else "")


def _simulated(ranks: Sequence[RankAnalysis]) -> str | None:
    count = sum(rank.simulated is not None for rank in ranks)
    if not count:
        return None
    which = "Every trace" if count == len(ranks) else f"{count} of {len(ranks)} traces"
    return f"{which} on this page {'comes' if count == len(ranks) else 'come'} from simulated GPUs."


def _facts(ranks: Sequence[RankAnalysis]) -> list[tuple[str, str]]:
    devices = sorted({name for rank in ranks for name in (rank.drawing or {}).get("device_names", [])})
    sizes = {rank.world_size for rank in ranks if rank.world_size}
    facts = [("traces", str(len(ranks)))]
    if devices:
        more = f" and {len(devices) - _MOST_NAMES} more" if len(devices) > _MOST_NAMES else ""
        facts.append(("device", ", ".join(devices[:_MOST_NAMES]) + more))
    if len(sizes) == 1:
        facts.append(("ranks in the job", str(sizes.pop())))
    if ranks:
        facts.append(("steps", ", ".join(map(str, sorted({len(rank.steps) for rank in ranks})))))
        facts.append(("recorded on", " and ".join(sorted({rank.kind.upper() for rank in ranks}))))
    return facts


def _sentence(ranks: Sequence[RankAnalysis]) -> str:
    if not ranks:
        return "Memory snapshots alone: what was held is below."
    judged = [rank for rank in ranks if rank.verdict is not None]
    if not judged:
        return "No verdict."
    first = judged[0]
    assert first.verdict is not None
    same = all(rank.verdict and rank.verdict.sentence == first.verdict.sentence for rank in judged)
    place = "" if same else f"Rank {first.rank}: "
    return place + first.verdict.sentence


def _tiles(rank: RankAnalysis) -> list[dict[str, str]]:
    """Return the first rank's main figures, shown in large type."""
    step, total = rank.mean_step, rank.time.total or 1
    where = "GPU" if rank.kind == "gpu" else "CPU"
    computes = (step.compute_only + step.overlapped) / (step.total or 1)
    tiles = [
        ("Mean step", display.ms(step.total / 1e6), f"ms, rank {rank.rank}"),
        (f"{where} computes", display.percent(computes), "of it"),
        ("Waits for communication", display.percent(rank.time.exposed_communication / total), "exposed"),
        (f"{where} idle", display.percent(rank.time.idle / total), "of the step"),
    ]
    return [{"name": name, "value": value, "unit": unit} for name, value, unit in tiles]


def _findings(ranks: Sequence[RankAnalysis]) -> list[str]:
    """Return the verdicts' other sentences, without repetition."""
    texts = [finding.text for rank in ranks if rank.verdict for finding in rank.verdict.findings]
    return [text for text in dict.fromkeys(texts) if text != _sentence(ranks)][:12]


def _across(analysis: Analysis) -> list[str]:
    """Return sentences about the ranks together."""
    sentences: list[str] = []
    for name, summary in analysis.configurations.items():
        place = f"{name}: " if name else ""
        sentences += across(name, summary)
        sentences += [f"{place}{warning}." for warning in summary.warnings]
    return sentences


def _content(rank: RankAnalysis) -> dict[str, object]:
    """Return a rank's content for the page's script, which also draws a sweep's configurations."""
    return {
        **dict.fromkeys(("problem", "timeline", "memory", "held", "held_by_unit", "ranks")),
        "settings": [],
        "results": _results(rank),
        "links": [],
        **(rank.drawing or {"warnings": list(rank.warnings), "verdict": [], "retries": []}),
    }


def _results(rank: RankAnalysis) -> list[list[str]]:
    memory = rank.memory
    pairs = [
        ("file", str(rank.path)),
        ("trusted", "yes" if rank.trusted else "no"),
        ("steps", str(len(rank.steps))),
        ("mean step", f"{display.ms(rank.mean_step.total / 1e6)} ms"),
        ("overlap", display.percent(rank.overlap_fraction)),
        ("kernel time", f"{display.ms(rank.tables.total / 1e6)} ms"),
        ("peak allocated", display.size(memory.peak_allocated)),
        ("peak reserved", display.size(memory.peak_reserved or None)),
    ]
    return [list(pair) for pair in pairs if not pair[1].startswith(display.NOTHING)]


def _snapshot(snapshot: SnapshotAnalysis) -> dict[str, object]:
    rows = tuple((display.size(held.bytes), held.where[:200]) for held in snapshot.holders[:_MOST_HOLDERS])
    peaks = (snapshot.peak_allocated, snapshot.peak_active, snapshot.peak_reserved)
    allocated, active, reserved = map(display.size, peaks)
    return {
        "name": f"{snapshot.path.name}, device {snapshot.device}",
        "lead": f"Peak {allocated} allocated, {active} active, {reserved} reserved.",
        "ooms": [f"Out of memory: {display.size(size)} were asked for." for size in snapshot.ooms],
        "table": Table.of(("held at the peak", "allocated by"), rows),
    }


MOST_BARS = 16


def time_chart(ranks: Sequence[RankAnalysis], names: Sequence[str]) -> Chart | None:
    """Return a bar per rank, labeled by `names`; for a single rank also per phase. None if nothing ran."""
    bars = [(name, rank.mean_step) for name, rank in zip(names, ranks, strict=True) if rank.time.total]
    if len(ranks) == 1:
        steps = max(len(ranks[0].steps), 1)
        bars += [(name, parts.per(steps)) for name, parts in ranks[0].phases.items() if parts.total]
    if not bars:
        return None
    shown = bars[:MOST_BARS]
    data = part_bars([parts for _, parts in shown], [1e-6] * len(shown), "PART %{x:.4g} ms")
    layout = part_layout("mean step, ms", [chart_text(name, 40) for name, _ in shown], 30)
    narrow = {"yaxis": {"ticktext": [chart_text(name, 14) for name, _ in shown]}}
    summary = "Stacked bars: compute only, overlapped, exposed communication and idle time of a mean step."
    note = f"The first {MOST_BARS} of {len(bars)}; the table has all." if len(bars) > MOST_BARS else ""
    rows = tuple((name, *part_cells(parts)) for name, parts in bars)
    table = Table(("what", *(f"{words}, ms" for _, words, _ in PARTS), "in all, ms", "overlap"), rows)
    return Chart("time", summary, data, layout, table, narrow, note)


_MOST_EVENTS = 6_000
_EVENTS_IN_ALL = 120_000
_LARGEST_MEMORY = 1 << 50


def draw_rank(trace: Trace, rank: RankAnalysis, *, traces: int) -> dict[str, object]:
    """Return the rank's part of a page of `traces` traces, in plain JSON values."""
    most = max(300, min(_MOST_EVENTS, _EVENTS_IN_ALL // max(traces, 1)))
    stated = [device.get("totalGlobalMem") for device in trace.devices]
    sizes = {size for size in stated if isinstance(size, int) and 0 < size < _LARGEST_MEMORY}
    known = float(sizes.pop()) if len(sizes) == 1 else None
    names = {str(device["name"])[:80] for device in trace.devices if device.get("name")}
    return trace_parts(trace, rank, known, most) | {"device_names": sorted(names)}
