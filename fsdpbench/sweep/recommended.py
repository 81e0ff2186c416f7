"""The configurations of a sweep that are recommended, as code to paste: torch's best and ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.store import Store
from fsdpbench.reports.result import Result, Status
from fsdpbench.sweep.snippets import snippets
from fsdpbench.systems import get_system

_FAMILIES = ("torch-fsdp", "impl-")


def write_recommended(folder: Path, results: Iterable[Result]) -> list[Path]:
    """Write `best_SYSTEM.py` of the fastest of each family that has an API into `folder`; the paths. What an
    earlier sweep left there goes. Of configurations with one speed, one that is not risky is taken."""
    for outdated in folder.glob("best_*.py"):
        outdated.unlink()
    best: dict[str, Result] = {}
    for result in results:
        system = str(result.stored("config.system"))
        family = next((name for name in _FAMILIES if system.startswith(name)), None)
        if family is None or result.status is not Status.OK or not result.step_time_s:
            continue
        if family not in best or _order(result) > _order(best[family]):
            best[family] = result
    configs = [Config.from_dict(best[family].config or {}) for family in _FAMILIES if family in best]
    paths = []
    for name, source in snippets(configs).items():
        write_whole(folder / name, source)
        paths.append(folder / name)
    return paths


def _order(result: Result) -> tuple[float, bool]:
    return result.throughput or 0.0, not result.is_risky


def compiled_beside_best(store: Store, points: Sequence[Config]) -> tuple[Config | None, str]:
    """Return the configuration to run, or None and why not.

    The best has the highest throughput of `points` (tokens, else samples, a second and GPU) in `store`.
    """
    if any(config.settings.compile for config in points):
        return None, "compile is among the settings of this sweep"
    rates: dict[str, float] = {}
    for point in store.points():
        if point.result.status is Status.OK and (rate := point.result.throughput):
            rates[point.key] = rate
    known = [config for config in points if content_key(config) in rates]
    if not known:
        return None, "no configuration finished"
    best = max(known, key=lambda config: rates[content_key(config)])
    compiled = replace(best, settings=replace(best.settings, compile=True))
    refused = get_system(compiled.system).not_applicable(compiled)
    if refused:
        return None, "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return compiled, ""
