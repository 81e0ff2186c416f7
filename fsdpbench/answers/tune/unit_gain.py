"""The gain of per-unit choices over the best uniform configuration: figures, and a picture.

The picture has a box for each block (recomputation) and each unit (resharding, offload, number of blocks,
prefetch), and below them the memory over a step, per unit and uniform.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fsdpbench.answers.tune.per_unit import Chosen, family_of
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings.values import is_mixed, spread, unit_sizes
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.results.store import point_folder_name
from fsdpbench.reports.analysis.activity import find_activity
from fsdpbench.reports.analysis.memory import device_clock, memory_curve
from fsdpbench.reports.analysis.units import fsdp_spans
from fsdpbench.reports.pages.display import gib
from fsdpbench.reports.pages.ranking import Paired, cost_of, pair, paired, rank
from fsdpbench.reports.pages.view import Configuration, load_run
from fsdpbench.reports.readers import read_trace
from fsdpbench.sweep.planning import workload_named

PICTURE = "per_unit.svg"


@dataclass(frozen=True)
class UnitGain:
    """The best uniform and the best per-unit configuration, after full runs. `gain`: of throughput, with its
    interval (None if no uniform one fits safely). `usual`: the recommended uniform configuration, if it is
    another one."""

    chosen: Chosen
    gain: Paired | None
    usual: Config | None = None

    @property
    def recommended(self) -> Config:
        """Return the recommended configuration: uniform unless the other is known to be faster."""
        uniform = self.chosen.uniform
        kept = uniform is not None and self.gain is not None and self.gain.low <= 0
        return self.usual or uniform.config if uniform and kept else self.chosen.by_unit.config

    def to_dict(self) -> Mapping[str, object]:
        """Return the JSON record, with all settings of the choice, because the name does not show them."""
        chosen, gain = self.chosen, self.gain
        best = chosen.by_unit
        return {
            "best": best.config.name,
            "settings": best.config.settings.to_dict(),
            "speed": best.speed,
            "peak_reserved_bytes": best.memory,
            "uniform": chosen.uniform and chosen.uniform.config.name,
            "gain": gain and {"change": gain.change, "interval": [gain.low, gain.high]},
            "recommended": self.recommended.name,
            "simulated": chosen.simulated,
        }

    @classmethod
    def of(cls, chosen: Chosen, usual: Config | None = None) -> "UnitGain":
        """Return the gain of `chosen`."""
        both = [cost_of(each.speed, each.interval) for each in (chosen.by_unit, chosen.uniform) if each]
        return cls(chosen, pair(*both) if chosen.uniform else None, usual)

    def words(self, rate: str = "") -> str:
        """Return the answer as text, with the speed of the choice given as `rate`."""
        chosen, settings = self.chosen, self.chosen.by_unit.config.settings
        if chosen.uniform and chosen.uniform.config == chosen.by_unit.config:
            return f"By unit: none of {chosen.simulated} choices is faster than the best uniform one{rate}"
        beside = {"recompute": settings.activation_checkpointing, "reshard": settings.reshard_after_forward}
        beside |= {"offload": settings.activation_offload or None}
        names = ("wrap", "forward_prefetch", "backward_prefetch_depth")
        beside |= {name: value for name in names if is_mixed(value := getattr(settings, name))}
        how = f"By unit: batch {settings.batch}"
        for name, value in beside.items():
            counts = Counter(spread(str(value))) if is_mixed(value) else {value: "all"}
            words = " ".join(f"{each} {count}" for each, count in counts.items())
            how += f", {name} {words}".lower() if value is not None else ""
        how += f"; {gib(chosen.by_unit.memory)} of {gib(chosen.usable)} GiB{rate}"
        if chosen.uniform is None or self.gain is None:
            return f"{how}; no uniform one tried fits safely"
        end = ": not distinguishable, so the uniform one stays the recommendation"
        how += f", {self.gain} against the best uniform one tried ({gib(chosen.uniform.memory)} GiB)"
        return how if self.recommended is chosen.by_unit.config else how + end


def gained(folder: Path, chosen: Chosen) -> "UnitGain":
    """Compare both configurations of `chosen` by their full runs in `folder`, and draw the picture there."""
    entries = {entry.row.folder.name: entry for entry in rank(load_run(folder))}
    one = entries[point_folder_name(chosen.by_unit.config)]
    other = chosen.uniform and entries[point_folder_name(chosen.uniform.config)]
    curves = [Curve.of(other.row, "uniform", "#999999")] if other else []
    write_whole(folder / PICTURE, draw(chosen, [*curves, Curve.of(one.row, "by unit", "#1d3557")]))
    return UnitGain(chosen, paired(one, other) if other else None)


@dataclass(frozen=True)
class Curve:
    """A line of the picture: points (ns, bytes allocated) of a step, index of its peak, bytes reserved."""

    name: str
    colour: str
    points: list[tuple[int, int]]
    peak: int
    reserved: int

    @classmethod
    def of(cls, row: Configuration, name: str, colour: str) -> "Curve":
        """Return the line of a row's first trace."""
        trace = read_trace(row.traces[0])
        clock = device_clock(find_activity(trace, fsdp_spans(trace)))
        curve = memory_curve(trace, max_points=600, clock=clock)
        times = (curve.time - curve.time[0]).tolist()
        points = [*zip(times, curve.allocated.tolist(), strict=True)]
        return cls(name, colour, points, int(curve.allocated.argmax()), int(curve.reserved.max()))


def draw(chosen: Chosen, curves: "list[Curve]") -> str:
    """Return the picture as SVG."""
    config = chosen.by_unit.config
    family, settings = family_of(config), config.settings
    count, sizes = len(family.kinds), unit_sizes(settings.wrap, workload_named(config).stacks())
    kept = settings.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    resharded = _each(settings.reshard_after_forward, family.units, "false" if kept else "true")
    offload = _each(settings.activation_offload, len(sizes) or count) if settings.activation_offload else []
    strips = [
        ("recomputed", _each(settings.activation_checkpointing, count), []),
        ("after forward", ["resharded" if each == "true" else "gathered" for each in resharded], sizes),
        ("activations", ["on the host" if each == "true" else "on the GPU" for each in offload], sizes),
    ]
    beside = {"blocks of a unit": settings.wrap, "ahead, forward": settings.forward_prefetch}
    for label, value in (beside | {"ahead, backward": settings.backward_prefetch_depth}).items():
        if is_mixed(value):
            strips.append((label, [word.removeprefix("every-") for word in spread(str(value))], sizes))
    template = Path(__file__).with_name(f"{PICTURE}.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True)
    return environment.from_string(template).render(
        name=config.name,
        strips=[(label, words, wide or [1] * len(words)) for label, words, wide in strips if words],
        legend=dict.fromkeys(word for _, words, _ in strips[:3] for word in words),
        usable=chosen.usable,
        most=max(chosen.usable, *(curve.reserved for curve in curves)),
        curves=curves,
        longest=max(curve.points[-1][0] for curve in curves),
    )


def _each(value: Any, count: int, alike: str = "") -> list[str]:
    if is_mixed(value):
        return spread(value)
    return [alike if value is None or (isinstance(value, int) and value > 1) else str(value).lower()] * count
