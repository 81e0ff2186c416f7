"""The gain of the choice by unit over the best uniform configuration: its figures, and a picture.

The picture has a box for each block (what it recomputes) and each unit (whether it is resharded, or what it
saves offloaded), and below them the memory of a step, by unit and uniform, with what torch may use.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.answers.tune.per_unit import Chosen, family_of
from fsdpbench.base.settings.values import is_mixed, spread
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.results.store import point_folder_name
from fsdpbench.reports.analysis.activity import find_activity
from fsdpbench.reports.analysis.memory import device_clock, memory_curve
from fsdpbench.reports.analysis.units import fsdp_spans
from fsdpbench.reports.pages.ranking import Paired, paired, rank
from fsdpbench.reports.pages.view import Configuration, load_run
from fsdpbench.reports.readers import read_trace

PICTURE = "per_unit.svg"
_COLOURS = {
    "none": "#2a9d5c",
    "op": "#e9b44c",
    "full": "#c8553d",
    "gathered": "#2a6f9d",
    "resharded": "#a9c1d6",
    "on the host": "#7d5ba6",
    "on the GPU": "#d5cbe2",
}
_OTHER = "#888888"
_UNIFORM, _BY_UNIT = ("uniform", "#999999"), ("by unit", "#1d3557")
_WIDTH, _LEFT, _CHART = 900, 110, 260
_GIB = 2**30


@dataclass(frozen=True)
class UnitGain:
    """The best uniform configuration and the one by unit, as run in full; `gain`: of throughput, with its
    interval (None: nothing uniform fits safely)."""

    chosen: Chosen
    gain: Paired | None

    def to_dict(self) -> Mapping[str, object]:
        """Return the record in `tune.json`."""
        chosen, gain = self.chosen, self.gain
        return {
            "best": chosen.by_unit.config.name,
            "uniform": chosen.uniform and chosen.uniform.config.name,
            "gain": gain and {"change": gain.change, "interval": [gain.low, gain.high]},
            "simulated": chosen.simulated,
        }

    @classmethod
    def untraced(cls, chosen: Chosen) -> UnitGain:
        """Return the gain where nothing ran in full: as uncertain as that of any two configurations."""
        uniform, interval = chosen.uniform, chosen.by_unit.interval
        ratio, apart = chosen.by_unit.speed / (uniform.speed if uniform else 1), 1 + (interval or {})["apart"]
        return cls(chosen, Paired(ratio - 1, ratio / apart - 1, ratio * apart - 1) if uniform else None)

    @property
    def words(self) -> str:
        """Return a sentence for people."""
        chosen, settings = self.chosen, self.chosen.by_unit.config.settings
        how = f"By unit: batch {settings.batch}, recompute {settings.activation_checkpointing}"
        beside = {"reshard": settings.reshard_after_forward, "offload": settings.activation_offload or None}
        how += "".join(f", {name} {each}".lower() for name, each in beside.items() if each is not None)
        how += f"; {_gib(chosen.by_unit)} of {chosen.usable / _GIB:.1f} GiB"
        if chosen.uniform is None or self.gain is None:
            return f"{how}; no uniform configuration fits safely"
        return f"{how}, {self.gain} against the best uniform ({_gib(chosen.uniform)} GiB)"


def _gib(candidate: Candidate) -> str:
    return f"{(candidate.memory or 0) / _GIB:.1f}"


def gained(folder: Path, chosen: Chosen) -> UnitGain:
    """Compare both configurations of `chosen`, which have run in full in `folder`, and draw them there."""
    entries = {entry.row.folder.name: entry for entry in rank(load_run(folder))}
    one = entries[point_folder_name(chosen.by_unit.config)]
    other = chosen.uniform and entries[point_folder_name(chosen.uniform.config)]
    curves = [(entry.row, *style) for entry, style in ((other, _UNIFORM), (one, _BY_UNIT)) if entry]
    write_whole(folder / PICTURE, _draw(chosen, curves))
    return UnitGain(chosen, paired(one, other) if other else None)


def _draw(chosen: Chosen, rows: list[tuple[Configuration, str, str]]) -> str:
    config = chosen.by_unit.config
    family, settings = family_of(config), config.settings
    recomputed = _each(settings.activation_checkpointing, len(family.kinds))
    kept = settings.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    resharded = _each(settings.reshard_after_forward, family.units, "false" if kept else "true")
    words = ["resharded" if each == "true" else "gathered" for each in resharded]
    offload = _each(settings.activation_offload, len(family.kinds)) if settings.activation_offload else []
    places = ["on the host" if each == "true" else "on the GPU" for each in offload]
    width, height = _LEFT + _WIDTH + 20, _CHART + 206
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{html.escape(config.name)}: each block, each unit, and memory</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_strip("recomputed", recomputed, 30),
        *_strip("after forward", words, 66),
        *_strip("activations", places, 102),
        *_legend(dict.fromkeys([*recomputed, *words, *places]), 142),
        *_chart(chosen.usable, rows, 166),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _each(value: Any, count: int, alike: str = "") -> list[str]:
    if is_mixed(value):
        return spread(value)
    return [alike if value is None or (isinstance(value, int) and value > 1) else str(value).lower()] * count


def _strip(label: str, each: list[str], y: int) -> list[str]:
    """Return a row of boxes, one for each block or unit."""
    width = _WIDTH / max(len(each), 1)
    parts = [] if not each else [_text(_LEFT - 10, y + 18, label, "end")]
    for place, word in enumerate(each):
        parts.append(
            f'<rect x="{_LEFT + place * width:.1f}" y="{y}" width="{width:.1f}" height="28" stroke="#fff" '
            f'fill="{_COLOURS.get(word, _OTHER)}"><title>{place}: {word}</title></rect>'
        )
    return parts


def _legend(words: dict[str, None], y: int) -> list[str]:
    parts = []
    for place, word in enumerate(words):
        x = _LEFT + place * 130
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS.get(word, _OTHER)}"/>')
        parts.append(_text(x + 18, y + 11, word))
    return parts


def _chart(usable: int, rows: list[tuple[Configuration, str, str]], y: int) -> list[str]:
    """Return lines of allocated memory over a step, and of what may be used."""
    traces = [read_trace(row.traces[0]) for row, _, _ in rows]
    clocks = [device_clock(find_activity(trace, fsdp_spans(trace))) for trace in traces]
    curves = [memory_curve(t, max_points=600, clock=clock) for t, clock in zip(traces, clocks, strict=True)]
    longest = max(int(curve.time[-1] - curve.time[0]) for curve in curves)
    most = max(usable, *(int(curve.reserved.max()) for curve in curves))

    def height(size: float) -> float:
        return y + _CHART * (1 - size / most)

    end, bottom = _LEFT - 10, y + _CHART
    parts = [
        _text(end, height(usable) + 5, f"{usable / _GIB:.1f} GiB", "end"),
        _text(end, bottom, "0", "end"),
    ]
    line = f"M{_LEFT} {height(usable):.1f}h{_WIDTH}"
    parts.append(f'<path d="{line}" stroke="#c8553d" stroke-dasharray="5 4"/>')
    for curve, (_, name, colour) in zip(curves, rows, strict=True):
        x = _LEFT + (curve.time - curve.time[0]) * (_WIDTH / longest)
        points = " ".join(f"{a:.1f},{height(b):.1f}" for a, b in zip(x, curve.allocated, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        peak = int(curve.allocated.argmax())
        words = f"{name}: {curve.allocated[peak] / _GIB:.1f} GiB allocated"
        parts.append(_text(x[peak] + 6, height(float(curve.allocated[peak])) - 4, words, colour=colour))
    return [*parts, _text(_LEFT + _WIDTH, bottom + 18, f"{longest / 1e6:,.0f} ms, simulated", "end")]


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{html.escape(words)}</text>'
