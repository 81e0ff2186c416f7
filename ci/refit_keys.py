"""Fits keys of hardware profiles to published runs, eager and compiled together, and judges the fit held out.

    python ci/refit_keys.py RUNS.csv [RUNS.csv ...] -o FOLDER          simulate, fit, print
    python ci/refit_keys.py --slopes FOLDER/slopes.csv                  fit and print again

Errors are those of the runs as they were (fsdpbench/engine/results/residuals/residuals.csv, or `--errors`).
How a step time follows each key is simulated with at most 16 layers, which says the same in a fraction of
the time: once as the profiles stand, once with each key changed. ln(time) is taken as linear in the keys'
logarithms (`kernel_share`: in the key).

The fit is generalised least squares. Runs of one source on one chip share an error of their own (0.03) beside
each run's (0.025), so that a source with many runs does not outvote the others; each key is held at its value
by a prior. Held out: every source's runs are predicted with keys that were fitted without that source.
FOLDER keeps the simulations. `--every 3` takes a third of the runs of llm-foundry and of the FSDP paper.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdpbench.base.files.documents import to_toml
from fsdpbench.cli.terminal.progress import make_progress
from fsdpbench.engine.results.residuals.widths import Condition, Quantity, read_table
from fsdpbench.lab.validation.paper_network import predict
from fsdpbench.lab.validation.runs.case import Case, known_cases
from fsdpbench.lab.validation.runs.runs_file import cases_of_file
from fsdpbench.launch import fork_server
from fsdpbench.sim.model.profile import HardwareProfile, load_profile
from fsdpbench.workloads import get_workload

OF_GROUP, OF_RUN = 0.03, 0.025
DEEPEST = 16
MANY = ("llm-foundry", "arXiv 2304.11277")


@dataclasses.dataclass(frozen=True)
class Key:
    """A key that is fitted: `paths` in a profile, by how much it is changed, and the prior's width.

    ``of_chip``: whether A100 and H100 have a value each. ``additive``: the step is added, not a factor.
    """

    name: str
    paths: tuple[str, ...]
    step: float
    prior: float
    of_chip: bool = True
    additive: bool = False


KEYS = (
    Key("gemm.under_load", ("gemm.under_load",), 0.94, 0.08),
    Key("gemm.weight_grad", ("gemm.weight_grad",), 1.1, 0.08),
    Key("attention.under_load", ("attention.under_load",), 0.92, 0.08),
    Key("contention.compute_slowdown", ("contention.compute_slowdown",), 0.92, 0.08),
    Key("nic.efficiency", ("nic.efficiency",), 0.9, 0.08),
    Key(
        "bandwidth.efficiency",
        tuple(f"bandwidth.efficiency.{kind}" for kind in ("pointwise", "copy", "reduction")),
        0.92,
        0.08,
    ),
    Key("bandwidth.fused_gain", ("bandwidth.fused_gain",), 1.1, 0.08, of_chip=False),
    Key("contention.kernel_share", ("contention.kernel_share",), 0.5, 0.5, of_chip=False, additive=True),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run: its error, ln(published time / predicted), and how ln(predicted) follows each key."""

    source: str
    chip: str
    name: str
    compiled: bool
    error: float
    slopes: dict[str, float]

    @property
    def group(self) -> tuple[str, str]:
        """Runs that share an error."""
        return self.source, self.chip


def chip_kind(chip: str) -> str:
    """`a100`, `h100`: chips whose keys are one."""
    return chip.split("-")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/refit"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--slopes", type=Path, help="the table that an earlier start wrote")
    parser.add_argument("--errors", type=Path, help="another table of residuals")
    parser.add_argument("--hold", action="append", default=[], help="keys that stay as they are")
    options = parser.parse_args()
    path = options.slopes or options.output / "slopes.csv"
    if options.slopes is None:
        fork_server.start("sim")
        write_slopes(path, simulate(options))
    print(report(runs_of(read_slopes(path), options.errors), options.hold))


# --------------------------------------------------------------------------------------------- simulations

Slopes = dict[tuple[str, str, str], dict[str, float]]
"""By source, chip and run: how ln(step time) follows each key."""


def simulate(options: argparse.Namespace) -> Slopes:
    """Slopes of all runs that were not out of memory."""
    given = [case for path in options.runs for case in cases_of_file(path)]
    cases = [case for case in known_cases("gpt", "t5") + given if not case.open]
    cases = [case for case in thinned(cases, options.every) if not case.ran_out and not case.collapsed]
    profiles = options.output.with_name(f"{options.output.name}-profiles").resolve()
    changed = [[with_key(shallow(case), key, profiles) for case in cases] for key in (None, *KEYS)]
    wanted = {id(case): case for row in changed for case in row if case is not None}
    found = predict(list(wanted.values()), None, options.output, make_progress(), options.jobs)
    predictions = dict(zip(wanted, found, strict=True))
    slopes: Slopes = {}
    for place, case in enumerate(cases):
        of_case = [row[place] for row in changed]
        steps = [None if each is None else predictions[id(each)].result.step_time_s for each in of_case]
        slopes[case.source, case.chip or case.hardware, case.name] = slopes_from(case, steps)
    return slopes


def shallow(case: Case) -> Case:
    """The case with at most `DEEPEST` layers."""
    shape = get_workload(case.model, shape=dict(case.shape) or None).shape
    layers = min(DEEPEST, shape["layers"])
    return dataclasses.replace(case, shape={**case.shape, "layers": layers})


def slopes_from(case: Case, steps: Sequence[float | None]) -> dict[str, float]:
    """`steps`: seconds as it is, and with each key changed (`None`: nothing follows from it)."""
    slopes = {key.name: 0.0 for key in KEYS}
    for key, step in zip(KEYS, steps[1:], strict=True):
        if step and steps[0]:
            value = value_of(load_profile(case.hardware), key.paths[0])
            new = changed_value(value, key)
            change = new - value if key.additive else math.log(new / value)
            slopes[key.name] = math.log(step / steps[0]) / change
    return slopes


def thinned(cases: Sequence[Case], every: int) -> list[Case]:
    """Each `every`-th of a chip's runs in sources that have many."""
    seen: dict[tuple[str, str, str], int] = {}
    kept = []
    for case in cases:
        place = (case.source, case.chip or case.hardware, case.model) if case.source in MANY else ("", "", "")
        seen[place] = seen.get(place, -1) + 1
        if not place[0] or seen[place] % every == 0:
            kept.append(case)
    return kept


def with_key(case: Case, key: Key | None, folder: Path) -> Case | None:
    """The case with a profile in which `key` is changed; `None` where no step time can follow from it."""
    if key is None:
        return dataclasses.replace(case)
    if key.name == "bandwidth.fused_gain" and not case.compiled:
        return None
    if key.name == "nic.efficiency" and case.gpus <= 8:
        return None
    base, plus, node = case.hardware.partition("+")
    hardware = f"{write_profile(key, base, folder)}{plus}{node}"
    return dataclasses.replace(case, hardware=hardware, chip=case.chip or case.hardware)


def write_profile(key: Key, base: str, folder: Path) -> Path:
    """A profile in `folder` that is `base` with `key` changed."""
    profile, name = load_profile(base), f"{base}-{key.name}"
    content: dict[str, Any] = {"base": base, "name": name}
    for dotted in key.paths:
        *parents, last = of_runs(profile, dotted).split(".")
        node = content
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = changed_value(value_of(profile, dotted), key)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(to_toml(content))
    return path


def of_runs(profile: HardwareProfile, path: str) -> str:
    """Return the key of the kernels of the runs' time: an older one where the profile has newer ones too."""
    is_older = profile.older is not None and path in ("gemm.weight_grad", "attention.under_load")
    return f"older.{path}" if is_older else path


def value_of(profile: HardwareProfile, path: str) -> float:
    """A figure of a profile."""
    node: object = profile
    for part in of_runs(profile, path).split("."):
        node = node[part] if isinstance(node, Mapping) else getattr(node, part)
    assert isinstance(node, (int, float))
    return float(node)


def changed_value(value: float, key: Key) -> float:
    """Down from it where it would leave its range."""
    if key.additive:
        return round(value + (key.step if value + key.step <= 1 else -key.step), 6)
    return round(value * key.step, 6)


def write_slopes(path: Path, slopes: Slopes) -> None:
    """One row a run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "chip", "run", *(key.name for key in KEYS)])
        for run, of_run in slopes.items():
            writer.writerow([*run, *(f"{of_run[key.name]:.5f}" for key in KEYS)])


def read_slopes(path: Path) -> Slopes:
    """Read the table that `write_slopes` wrote."""
    with path.open(newline="") as file:
        return {
            (row["source"], row["chip"], row["run"]): {key.name: float(row[key.name]) for key in KEYS}
            for row in csv.DictReader(file)
        }


def runs_of(slopes: Slopes, errors: Path | None) -> list[Run]:
    """Runs with slopes whose error is in the table; those that retry are left out."""
    rows = read_table() if errors is None else read_table(errors)
    return [
        Run(row.source, row.chip, row.run, row.compiled, row.log_ratio, slopes[row.source, row.chip, row.run])
        for row in rows
        if row.condition is Condition.KNOWN and row.quantity is Quantity.TIME and not row.retries
        if (row.source, row.chip, row.run) in slopes
    ]


# ----------------------------------------------------------------------------------------------------- fit


@dataclasses.dataclass(frozen=True)
class Fit:
    """Return the term added to each key (to its logarithm, or to it), with standard errors."""

    names: tuple[tuple[str, str], ...]
    change: np.ndarray
    error: np.ndarray

    def predicted(self, run: Run) -> float:
        """The run's error that is left."""
        return run.error - float(slopes_of(run, self.names) @ self.change)


def slopes_of(run: Run, names: Sequence[tuple[str, str]]) -> np.ndarray:
    """How the run follows each key; those of other chips not at all."""
    mine = ("", chip_kind(run.chip))
    return np.array([run.slopes.get(name, 0.0) if chip in mine else 0.0 for name, chip in names])


def fit(runs: Sequence[Run], hold: Sequence[str] = ()) -> Fit:
    """Generalised least squares with a prior that holds each key where it is."""
    chips = sorted({chip_kind(run.chip) for run in runs} | {"a100", "h100"})
    named = [
        (key, chip) for key in KEYS if key.name not in hold for chip in (chips if key.of_chip else ("",))
    ]
    names = tuple((key.name, chip) for key, chip in named)
    information = np.diag([key.prior**-2 for key, _ in named])
    right = np.zeros(len(named))
    for group in sorted({run.group for run in runs}):
        members = [run for run in runs if run.group == group]
        slopes = np.array([slopes_of(run, names) for run in members])
        errors = np.array([run.error for run in members])
        covariance = OF_RUN**2 * np.eye(len(members)) + OF_GROUP**2
        weighed = slopes.T @ np.linalg.inv(covariance)
        information += weighed @ slopes
        right += weighed @ errors
    inverse = np.linalg.inv(information)
    return Fit(names, inverse @ right, np.sqrt(np.diag(inverse)))


def held_out(runs: Sequence[Run], hold: Sequence[str] = ()) -> list[float]:
    """Each run's error with keys fitted without its source."""
    fits = {
        source: fit([run for run in runs if run.source != source], hold)
        for source in {run.source for run in runs}
    }
    return [fits[run.source].predicted(run) for run in runs]


def report(runs: Sequence[Run], hold: Sequence[str]) -> str:
    whole = fit(runs, hold)
    additive = {key.name for key in KEYS if key.additive}
    lines = ["key | chip | change | standard error", "--- | --- | --: | --:"]
    for (name, chip), change, error in zip(whole.names, whole.change, whole.error, strict=True):
        shown = f"{change:+.3f}" if name in additive else f"x {math.exp(change):.3f}"
        lines.append(f"{name} | {chip} | {shown} | {error:.3f}")
    for source in sorted({run.source for run in runs}):
        without = fit([run for run in runs if run.source != source], hold).change
        lines.append(f"without {source} | | " + " ".join(f"{change:+.3f}" for change in without) + " |")
    out = held_out(runs, hold)
    columns = {"as it is": [run.error for run in runs], "fitted": [whole.predicted(run) for run in runs]}
    columns["source held out"] = out
    lines += ["", "runs | count | " + " | ".join(f"{name}: mean, worst, bias" for name in columns)]
    groups = sorted({(run.source, run.chip, run.compiled) for run in runs})
    for group in [*groups, None]:
        places = [i for i, run in enumerate(runs) if group in (None, (run.source, run.chip, run.compiled))]
        lines.append(row_of(group, [[errors[i] for i in places] for errors in columns.values()]))
    unfitted = [i for i, run in enumerate(runs) if run.source != "llm-foundry"]
    lines.append(
        row_of(("all but llm-foundry", "", False), [[e[i] for i in unfitted] for e in columns.values()])
    )
    return "\n".join(lines)


def row_of(group: tuple[str, str, bool] | None, columns: Sequence[Sequence[float]]) -> str:
    """Errors as times: above 0 where the prediction is too slow."""
    name = "all" if group is None else " ".join([*group[:2], "compiled" if group[2] else ""]).strip()
    cells = []
    for errors in columns:
        shown = [math.expm1(-error) for error in errors]
        mean, worst = np.mean(np.abs(shown)), max(map(abs, shown))
        cells.append(f"{mean:.1%}, {worst:.1%}, {np.mean(shown):+.1%}")
    return f"{name} | {len(columns[0])} | " + " | ".join(cells)


if __name__ == "__main__":
    main()
