"""`fsdpbench calibrate --from-result`: a profile scaled by runs of one's own."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.output import show_json, tell
from fsdpbench.reports.result import Result

if TYPE_CHECKING:
    from fsdpbench.lab.calibrate.from_results import Factor, Fit, MeasuredRun


def calibrate_from_results(
    paths: Sequence[Path], output: Path, *, device: str, base: str | None, fit: str | None, as_json: bool
) -> None:
    """Fit factors to the runs at `paths` (results, folders with such, tables of runs) and write the profile
    to `output`. Raises `UsageError` where the runs do not determine them."""
    from fsdpbench.lab.calibrate import from_results
    from fsdpbench.launch import fork_server

    tables = [path for path in paths if path.suffix == ".csv"]
    runs = from_results.runs_of_results([path for path in paths if path not in tables], device)
    runs += [run for path in tables for run in _runs_of_table(path)]
    base = base or _with_their_nodes(_one_chip(runs), runs)
    factors = _factors(fit, runs)
    tell(f"fitting {', '.join(factors)} of {base} to {len(runs)} measured run{'s'[: len(runs) > 1]}")
    fork_server.start("sim")
    with tempfile.TemporaryDirectory() as name:
        found = from_results.fit(runs, base, factors, _Simulator(runs, Path(name)), Path(name))
    told = _told(found)
    found.profile.write(output, dict(zip(found.profile.keys(), [told] * 9, strict=False)), f"{base}; {told}")
    tell(f"{output}: {told}")
    for run, before, after in zip(runs, found.before, found.after, strict=True):
        tell(f"{run.name}: step time {before:+.1%} off before, {after:+.1%} with it")
    if as_json:
        show_json(_record(found, runs, output))


def _runs_of_table(path: Path) -> list[MeasuredRun]:
    """Rows of a file that `validate --runs` takes, whose speed was measured."""
    from fsdpbench.lab.calibrate.from_results import MeasuredRun
    from fsdpbench.lab.validation.paper_network import config_of
    from fsdpbench.lab.validation.runs.runs_file import cases_of_file

    found = []
    for case in cases_of_file(path):
        figure = next((figure for figure in case.published if figure.is_time), None)
        if figure is not None:
            value = case.published[figure] * figure.unit
            config = config_of(case)
            found.append(
                MeasuredRun(case.name, config, figure.path[0], value, figure.is_speed, case.hardware)
            )
    return found


def _one_chip(runs: Sequence[MeasuredRun]) -> str:
    chips = sorted({run.chip for run in runs})
    if len(chips) != 1 or not chips[0]:
        told = ", ".join(filter(None, chips)) or "no packaged profile that is alike"
        raise UsageError(f"--from-result: the runs are of {told}; name the profile to scale by --base")
    return chips[0]


def _with_their_nodes(chip: str, runs: Sequence[MeasuredRun]) -> str:
    """The chip's profile with the nodes that all runs on several had, whose network is fitted."""
    from fsdpbench.sim.model.profile import stated_machine

    sizes = {run.config.gpus_per_node for run in runs if run.config.gpus > run.config.ranks_per_node}
    stated = len(sizes) == 1 and "+" not in chip and not any(run.config.gpus_used_per_node for run in runs)
    return stated_machine(chip, sizes.pop()) if stated else chip


def _factors(given: str | None, runs: Sequence[MeasuredRun]) -> list[Factor]:
    """What is asked for; else the network of runs on several nodes, and computation on one."""
    from fsdpbench.lab.calibrate.from_results import Factor

    if given is None:
        several = any(run.config.gpus > run.config.ranks_per_node for run in runs)
        return [Factor.NETWORK if several else Factor.COMPUTE]
    words = [word.strip() for word in given.split(",")]
    unknown = [word for word in words if word not in set(Factor)]
    if unknown or len(set(words)) < len(words):
        raise UsageError(f"--fit {given}: name each once, of {', '.join(Factor)}")
    return [Factor(word) for word in words]


@dataclasses.dataclass(frozen=True)
class _Simulator:
    """Simulates all runs on the profile in a file."""

    runs: Sequence[MeasuredRun]
    folder: Path

    def __call__(self, hardware: Path) -> list[Result]:
        from fsdpbench.engine.results.provenance import content_key
        from fsdpbench.sweep.runner import UNTRACED, simulate
        from fsdpbench.sweep.trials import Progress

        configs = [
            dataclasses.replace(run.config, device="sim", hardware=str(hardware), measurement=UNTRACED)
            for run in self.runs
        ]
        found = simulate(configs, self.folder / hardware.stem, Progress())
        return [found[content_key(config)] for config in configs]


def _told(found: Fit) -> str:
    parts = []
    for factor, value in found.profile.factors.items():
        low, high = found.interval(factor)
        parts.append(f"{factor} x{value:.3f} (90 % of cases: x{low:.3f} to x{high:.3f})")
    return "fitted to measured runs: " + ", ".join(parts)


def _record(found: Fit, runs: Sequence[MeasuredRun], output: Path) -> dict[str, Any]:
    factors = [
        {
            "name": factor.value,
            "factor": value,
            "interval": list(found.interval(factor)),
            "level": 0.9,
            "sensitivity": found.sensitivity[factor],
        }
        for factor, value in found.profile.factors.items()
    ]
    errors = [
        {"run": run.name, "error_before": before, "error_after": after}
        for run, before, after in zip(runs, found.before, found.after, strict=True)
    ]
    keys = found.profile.keys()
    return {
        "schema": 1,
        "file": str(output),
        "base": found.profile.base,
        "factors": factors,
        "keys": keys,
        "runs": errors,
    }
