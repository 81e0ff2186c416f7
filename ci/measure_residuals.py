"""Writes fsdpbench/engine/results/residuals/residuals.csv: how far published runs are from their predictions.

    python ci/measure_residuals.py RUNS.csv [RUNS.csv ...] -o FOLDER

Each file is one that `fsdpbench validate --runs` takes (ci/found_runs.py converts others). Every run is
predicted as it was, and then as if its chip, network or software were not known (ci/residual_rows.py).
FOLDER keeps the simulations: a second start simulates what is missing. About half an hour on two cores;
`--every 3` takes a third of the runs wherever something is taken as not known. `--source`, `--condition`,
`--run`: a part of it.

    python ci/measure_residuals.py

prints what follows from the table as it is: the tables of docs/validation.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from measure_differences import width_of_run
from residual_rows import residuals_of, under, write_table

from fsdpbench.cli.terminal.progress import make_progress
from fsdpbench.engine.results.residuals.widths import (
    APART,
    AS_IT_WAS,
    Condition,
    Quantity,
    Residual,
    Unknown,
    Width,
    read_table,
    width_of,
)
from fsdpbench.lab.validation.paper_network import predict
from fsdpbench.lab.validation.runs.case import Case, known_cases
from fsdpbench.lab.validation.runs.runs_file import cases_of_file
from fsdpbench.launch import fork_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/residuals"))
    parser.add_argument("--every", type=int, default=1, help="of each group, where something is not known")
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--source", action="append", help="renew the rows of these sources alone")
    parser.add_argument("--condition", action="append", type=Condition, help="and of these conditions")
    parser.add_argument("--run", action="append", help="and of runs whose name has this in it")
    options = parser.parse_args()
    if options.runs:
        fork_server.start("sim")
        measure(options)
    print(widths())
    print(coverage())


def measure(options: argparse.Namespace) -> None:
    output: Path = options.output
    profiles = output.with_name(f"{output.name}-profiles")
    given = [case for path in options.runs for case in cases_of_file(path)]
    known = known_cases("gpt", "t5") + given
    conditions = options.condition or list(Condition)
    parts = {
        condition: under(condition, known, known_cases("open", "settings"), profiles)
        for condition in conditions
    }
    for condition, part in parts.items():
        wanted = [case for case in part if _is_asked_for(case, options)]
        whole = condition in (Condition.KNOWN, Condition.NEW_CHIP)
        parts[condition] = wanted if whole else sampled(wanted, options.every)
    cases = [case for part in parts.values() for case in part]
    predictions = iter(predict(cases, None, output, make_progress(), options.jobs))
    measured = [
        residual
        for condition, part in parts.items()
        for residual in residuals_of(condition, [next(predictions) for _ in part])
    ]
    by_run = options.run is not None
    renewed = {_group(residual, by_run) for residual in measured}
    kept = [row for row in read_table() if _group(row, by_run) not in renewed]
    everything = options.source is None and options.condition is None and not by_run
    write_table(measured if everything else sorted([*kept, *measured], key=_order))
    read_table.cache_clear()


def _is_asked_for(case: Case, options: argparse.Namespace) -> bool:
    return (options.source is None or case.source in options.source) and (
        options.run is None or any(text in case.name for text in options.run)
    )


def _group(row: Residual, by_run: bool) -> tuple[str, ...]:
    """Rows that are renewed together."""
    return (row.condition, row.source, row.run if by_run else "")


def _order(row: Residual) -> tuple[int, str]:
    return list(Condition).index(row.condition), row.source


def sampled(cases: Sequence[Case], every: int) -> list[Case]:
    """Each `every`-th case of a source on a chip, the first included."""
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.source, case.chip or case.hardware].append(case)
    return [case for group in groups.values() for case in group[::every]]


def widths() -> str:
    """Half the interval for each thing that may be unknown, as a share of its middle."""
    lines = ["| unknown | step time | allocated | active | reserved |", "|---|--:|--:|--:|--:|"]
    for unknown in (None, *(each for each in Unknown if each is not Unknown.UNMEASURED)):
        found = [width_of(quantity, () if unknown is None else (unknown,)) for quantity in Quantity]
        cells = " | ".join(f"{width.half:.1%}" for width in found)
        lines.append(f"| {unknown or 'nothing'} | {cells} |")
    shares = {share: width_of(Quantity.TIME, ()).with_network(share, 8) for share in (0.3, 0.5, 0.6, 0.9)}
    longer = [f"{share}: {width.around(1.0)[1]:.2f}" for share, width in shares.items()]
    lines += ["", f"Network not measured, times as long by share of collectives: {', '.join(longer)}."]
    return "\n".join([*lines, "", f"Distinguished from {math.expm1(APART):.1%} on.", ""])


def coverage() -> str:
    """Runs as they were, inside their interval with their source held out, by source."""
    groups: dict[tuple[bool, str], list[tuple[float, Width]]] = defaultdict(list)
    for row in read_table():
        if row.condition in AS_IT_WAS and row.quantity is Quantity.TIME:
            groups[row.fitted, row.source].append((row.log_ratio, width_of_run(row)))
    lines = [
        "| source | runs | mean error | worst | bias | inside, source held out | median half width |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (fitted, source), found in sorted(groups.items()):
        errors = [math.expm1(-ratio) for ratio, _ in found]
        inside = sum(width.covers(ratio) for ratio, width in found)
        half = statistics.median(width.half for _, width in found)
        lines.append(
            f"| {source}{' (constants fitted to it)' if fitted else ''} | {len(found)} "
            f"| {statistics.fmean(map(abs, errors)):.1%} | {max(map(abs, errors)):.1%} "
            f"| {statistics.fmean(errors):+.1%} | {inside} | {half:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
