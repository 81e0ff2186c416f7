"""The best configuration of a sweep once more, compiled, where no configuration of it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpbench.configuration.config import Config
from fsdpbench.reports.result import Status
from fsdpbench.results.provenance import content_key
from fsdpbench.results.store import Store
from fsdpbench.systems import get_system


def compiled_beside_best(store: Store, points: Sequence[Config]) -> tuple[Config | None, str]:
    """What to run, or None and why not.

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
