"""How a configuration ended, before and after: the whole table of docs/gate.md, and the exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from fsdpbench.answers.check.compare import Verdict, compare, outcome
from fsdpbench.answers.check.records.entries import Entry, entry_of
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.base.errors import BenchError, ExitCode
from fsdpbench.cli.commands.check import finish
from fsdpbench.engine.results.records import Status

DOCS = Path(__file__).parents[3] / "docs" / "gate.md"
FAILURES = [Status.ERROR, Status.CRASH, Status.TIMEOUT, Status.RACE, Status.RANK_MISMATCH]
GROUPS = {
    "ok": [Status.OK],
    "oom": [Status.OOM],
    "not applicable": [Status.NOT_APPLICABLE],
    "any failure": FAILURES,
}
SAID = {
    "its figures": None,
    "equal": None,
    "worse": Verdict.WORSE,
    "better": Verdict.BETTER,
    "cannot judge": Verdict.UNKNOWN,
}


def cells() -> dict[tuple[Status, Status], Verdict | None]:
    """The table of docs/gate.md without its sides that are not there."""
    lines = DOCS.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| before"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + 6]]
    columns, found = rows[0][1:-1], {}
    for row in rows[2:]:
        for column, cell in zip(columns, row[1:-1], strict=True):
            for before in GROUPS[row[0]]:
                found |= {(before, after): SAID[cell] for after in GROUPS[column]}
    return found


def test_every_pair_is_in_the_table() -> None:
    table = cells()
    assert table.keys() == {(before, after) for before in Status for after in Status}
    assert {pair: outcome(*pair) for pair in table} == table


def test_the_table_of_the_code_is_that_of_the_docs() -> None:
    import fsdpbench.answers.check.compare as module

    assert module.__doc__ is not None
    printed = [line for line in module.__doc__.replace("\\\\", "\\").splitlines() if line.startswith("|")]
    assert "\n".join(printed) in DOCS.read_text()


def an_entry(status: Status = Status.OK, step: float | None = 0.5, device: str = "sim") -> Entry:
    result: dict[str, Any] = {"status": status.value, "device": device, "step_time_s": step}
    result["cause"] = {"message": "rank 0: it broke", "log": None} if status is not Status.OK else None
    return entry_of([result])


def code(before: dict[str, Entry], after: dict[str, Entry], **more: Any) -> int:
    """The exit code of a comparison."""
    try:
        finish(compare(before, after, Thresholds(), **more), after, "text")
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except BenchError as error:
        return int(error.exit_code)
    return 0


OKAY, FAILED = an_entry(), an_entry(Status.ERROR)
SLOWER, NO_FIGURE = an_entry(step=0.6), an_entry(step=float("nan"))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": OKAY}, {"a": OKAY}, ExitCode.OK),
        ({"a": OKAY}, {"a": OKAY, "b": an_entry(Status.OOM)}, ExitCode.OK),
        ({"a": OKAY}, {"a": OKAY, "b": FAILED}, ExitCode.SOME_FAILED),
        ({"a": OKAY, "b": FAILED}, {"a": OKAY, "b": FAILED, "c": FAILED}, ExitCode.CANNOT_JUDGE),
        ({"a": OKAY}, {"a": NO_FIGURE, "b": FAILED}, ExitCode.CANNOT_JUDGE),
        ({"a": OKAY, "b": OKAY}, {"a": NO_FIGURE, "b": SLOWER, "c": FAILED}, ExitCode.REGRESSION),
        ({"a": OKAY, "b": OKAY}, {"b": SLOWER}, ExitCode.REGRESSION),
        ({"a": OKAY, "b": OKAY}, {"b": OKAY}, ExitCode.CANNOT_JUDGE),
        ({"a": FAILED}, {"a": NO_FIGURE}, ExitCode.CANNOT_JUDGE),
        ({"a": NO_FIGURE}, {"a": NO_FIGURE}, ExitCode.CANNOT_JUDGE),
        ({"a": an_entry(step=None)}, {"a": an_entry(step=None)}, ExitCode.CANNOT_JUDGE),
        ({"a": OKAY}, {"a": an_entry(device="cpu")}, ExitCode.CANNOT_JUDGE),
        ({}, {"a": OKAY}, ExitCode.CANNOT_JUDGE),
    ],
)
def test_one_comes_before_three_before_four(
    before: dict[str, Entry], after: dict[str, Entry], expected: ExitCode
) -> None:
    assert code(before, after) == expected


def test_what_has_no_result_on_a_side_cannot_be_judged(capsys: pytest.CaptureFixture[str]) -> None:
    both = {"a": OKAY}
    assert code(both, both, absent={"b": "its result is cut short"}) == ExitCode.CANNOT_JUDGE
    assert "unknown: b: its result is cut short" in capsys.readouterr().out
    assert code(both, both, absent={"b": "its result is cut short"}, left_out=["b"]) == ExitCode.OK
    assert code(both, {"a": OKAY, "b": FAILED}, left_out=["b"]) == ExitCode.OK


def test_of_many_runs_the_worst_counts() -> None:
    fine = {"status": "ok", "device": "cpu", "step_time_s": 0.5}
    runs = [fine, {**fine, "status": "timeout", "cause": {"message": "ran past 600 s"}}, fine]
    entry = entry_of(runs)
    assert (entry.status, len(entry.runs)) == (Status.TIMEOUT, 2)
    assert entry.cause == "in 1 of 3 runs: ran past 600 s"
    told = compare({"a": entry_of([fine])}, {"a": entry}, Thresholds()).regressions
    assert [(change.metric, change.after, change.reason) for change in told] == [
        ("status", "timeout", entry.cause)
    ]


def test_a_better_end_with_figures_that_are_none_is_no_gain(capsys: pytest.CaptureFixture[str]) -> None:
    assert code({"a": an_entry(Status.OOM)}, {"a": OKAY}) == ExitCode.OK
    assert "Keep the gain" in capsys.readouterr().out
    assert code({"a": an_entry(Status.OOM)}, {"a": NO_FIGURE}) == ExitCode.CANNOT_JUDGE
    assert "Keep the gain" not in capsys.readouterr().out
