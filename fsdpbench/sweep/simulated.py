"""Simulates the bench's own configurations in a sweep's folder, so that they resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdpbench.configuration.config import Config, Measurement
from fsdpbench.reports.result import Result
from fsdpbench.results.provenance import content_key
from fsdpbench.results.result import not_applicable_result
from fsdpbench.results.store import Store
from fsdpbench.sweep.planning import not_applicable
from fsdpbench.sweep.runner import Progress, jobs_for, run_sweep

# Step time and memory come from the untraced pass.
UNTRACED = Measurement(2, 1, 0, timeout_s=600.0, most_warmup_steps=12, most_timed_steps=8)


def simulate(
    configs: Sequence[Config], folder: Path, progress: Progress, jobs: int | None = None
) -> dict[str, Result]:
    """Run what `folder` does not hold yet; the results by content key, `not_applicable` among them."""
    refused = {content_key(c): not_applicable_result(c, why) for c in configs if (why := not_applicable(c))}
    unique = list({key: c for c in configs if (key := content_key(c)) not in refused}.values())
    store = Store.open_or_create(folder)
    with store.locked():
        systems = sorted({config.system for config in unique})
        store.write_space({"schema": 1, "system": systems}, unique)
        run_sweep(store, unique, progress, jobs=jobs or jobs_for("sim"))
    return refused | {key: stored.result for key, stored in store.finished().items()}
