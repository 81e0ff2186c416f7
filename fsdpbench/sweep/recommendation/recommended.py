"""The configurations of a sweep that are recommended, as code to paste: the best of torch's FSDPs and of
ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fsdpbench.configuration.config import Config
from fsdpbench.files.whole_files import write_whole
from fsdpbench.reports.result import Result
from fsdpbench.results.records import Status
from fsdpbench.sweep.recommendation.snippets import snippets

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
