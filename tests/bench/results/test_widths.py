"""Widths of intervals: the quantile by brute force, coverage of drawn groups, and the packaged table."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from fsdpbench.engine.results.residuals.widths import (
    APART,
    AS_IT_WAS,
    LEVEL,
    Condition,
    Quantity,
    Residual,
    Unknown,
    Width,
    by_network,
    is_held_out,
    read_table,
    weighted_quantile,
    widening,
    width_of,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ci"))
from measure_differences import difference_quantile, width_of_run
from residual_rows import write_table


def a_row(log_ratio: float = 0.0, **changes: Any) -> Residual:
    row: dict[str, Any] = {
        "condition": Condition.KNOWN, "source": "s", "chip": "a100-80gb", "run": "r", "model": "m",
        "family": "gpt", "system": "torch-fsdp1", "software": "current", "fitted": False, "compiled": False,
        "gpus": 8, "nodes": 1, "network": "stated", "retries": 0.0, "full": 0.5, "network_share": 0.0,
        "quantity": Quantity.TIME,
        "unit": "ms", "published": 1.0, "predicted": 1.0, "log_ratio": log_ratio,
    }  # fmt: skip
    return Residual(**(row | changes))


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_any_size_count_alike(seed: int) -> None:
    draw = random.Random(seed)
    groups = [[draw.uniform(-1, 1) for _ in range(draw.choice((1, 2, 3, 4, 6, 12)))] for _ in range(7)]
    rows = [a_row(value, source=str(place)) for place, group in enumerate(groups) for value in group]
    # Each group repeated to twelve rows: then every row counts alike.
    repeated = sorted(abs(value) for group in groups for value in group * (12 // len(group)))
    wanted = repeated[math.ceil(LEVEL * len(repeated)) - 1]
    assert weighted_quantile(rows) == wanted


def test_few_groups_are_covered_whole() -> None:
    rows = [a_row(value, source=source) for source in "abc" for value in (0.01, -0.3)]
    assert weighted_quantile(rows) == 0.3
    assert weighted_quantile([]) == 0.0


def test_new_groups_are_covered_as_promised() -> None:
    draw = random.Random(1)

    def group(name: str) -> list[Residual]:
        shared = draw.gauss(0, 0.05)
        return [a_row(shared + draw.gauss(0, 0.02), source=name) for _ in range(draw.randint(1, 25))]

    width = width_of(Quantity.TIME, (), rows=[row for place in range(200) for row in group(str(place))]).log
    shares = [statistics.fmean(abs(row.log_ratio) <= width for row in group("new")) for _ in range(1000)]
    assert statistics.fmean(shares) == pytest.approx(LEVEL, abs=0.03)


@pytest.mark.parametrize("groups", [4, 5, 7, 10, 50])
def test_few_groups_widen_as_students_t_does(groups: int) -> None:
    exact = scipy.stats.t.ppf((1 + LEVEL) / 2, groups - 1) / scipy.stats.norm.ppf((1 + LEVEL) / 2)
    assert widening(groups) == pytest.approx(exact, rel=0.01)


def test_a_seventh_group_is_covered_by_six() -> None:
    draw = random.Random(2)

    def group(name: str) -> list[Residual]:
        shared = draw.gauss(0, 0.05)
        return [a_row(shared + draw.gauss(0, 0.02), source=name) for _ in range(8)]

    shares = []
    for _ in range(120):
        width = width_of(Quantity.TIME, (), rows=[row for each in "abcdef" for row in group(each)]).log
        shares += [statistics.fmean(abs(row.log_ratio) <= width for row in group("new"))]
    assert statistics.fmean(shares) > 0.87


def test_what_is_unknown_adds_its_variance() -> None:
    rows = [a_row(0.03, source=s) for s in "abc"]  # too few to be widened
    rows += [a_row(0.05, source=s, condition=Condition.CHIP) for s in "abc"]
    rows += [a_row(0.01, source=s, condition=Condition.SOFTWARE) for s in "abc"]
    rows += [a_row(0.5, source="a", retries=2.0)]

    def log(*unknown: Unknown) -> float:
        return width_of(Quantity.TIME, unknown, rows=rows).log

    assert log() == 0.03
    assert log(Unknown.CHIP) == pytest.approx(0.05)
    assert log(Unknown.SOFTWARE) == 0.03  # never narrower
    assert log(Unknown.MEMORY) == pytest.approx(0.5)
    assert log(Unknown.CHIP, Unknown.MEMORY) == pytest.approx(math.sqrt(0.05**2 + 0.5**2 - 0.03**2))


def test_fitted_sources_and_what_is_held_out_do_not_count() -> None:
    rows = [a_row(0.03, source=s) for s in "ab"] + [a_row(0.2, source="e")]
    assert width_of(Quantity.TIME, (), rows=rows).log == 0.2
    assert width_of(Quantity.TIME, (), without="e", rows=rows).log == 0.03
    fitted = [a_row(0.9, source=s, fitted=True) for s in "fgh"]
    assert width_of(Quantity.TIME, (), rows=rows + fitted).log == 0.2
    assert width_of(Quantity.TIME, (), rows=rows).runs == 3


def test_compiled_runs_have_a_width_where_some_were_compared() -> None:
    rows = [a_row(0.03, source=s) for s in "abc"]
    rows += [a_row(0.1, source=s, condition=Condition.SOFTWARE) for s in "abc"]
    none = width_of(Quantity.TIME, (), compiled=True, rows=rows)
    assert (none.because, none.log) == ((Unknown.COMPILED,), pytest.approx(0.1))
    compared = [a_row(0.06, source=s, compiled=True) for s in "abc"]
    some = width_of(Quantity.TIME, (), compiled=True, rows=rows + compared)
    assert (some.because, some.log) == ((), 0.06)
    assert width_of(Quantity.TIME, (), rows=rows + compared).log == 0.03


def test_the_error_of_a_comparison_by_brute_force() -> None:
    values = {"a": (0.0, 0.01, 0.05), "b": (0.2, 0.2), "c": (0.4,)}
    rows = [a_row(value, model=name) for name, group in values.items() for value in group]
    # Pairs of `a` weigh a third each (0.01, 0.04, 0.05), that of `b` one: 0.9 of 2 is inside the last third.
    assert difference_quantile(rows) == pytest.approx(0.05)
    assert difference_quantile(rows, level=0.5) == pytest.approx(0.0)
    assert difference_quantile(read_table()) == pytest.approx(APART, abs=5e-5), "the constant is fitted"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [a_row(0.125, fitted=True), a_row(-0.5, quantity=Quantity.RESERVED, compiled=True, nodes=16)]
    write_table(rows, tmp_path / "t.csv")
    assert list(read_table(tmp_path / "t.csv")) == rows


def test_the_table_names_software_not_files_of_the_machine_that_made_it() -> None:
    assert [
        row.software for row in read_table() if "/" in row.software or row.software.endswith(".toml")
    ] == []


def test_residuals_are_the_logarithms_of_their_figures() -> None:
    for row in read_table():
        inverse = row.unit.startswith(("tokens", "TFLOPS", "samples"))
        ratio = row.predicted / row.published if inverse else row.published / row.predicted
        assert row.log_ratio == pytest.approx(math.log(ratio), abs=2e-5), row.run


def test_the_network_widens_upwards_by_its_share() -> None:
    assert by_network(0.25, 512) == 0  # 2.5 times as long, and still hidden
    assert by_network(0.9, 512) == pytest.approx(math.log(1 + 1.5 * 0.9))
    assert 0 < by_network(0.3, 512) < by_network(0.5, 512) < by_network(0.9, 512) < by_network(0.9, 1024)
    wide = Width(0.1, (), 7).with_network(0.9, 64)
    assert wide.because == (Unknown.UNMEASURED,)
    low, high = wide.around(1.0)
    assert (low, high) == pytest.approx((math.exp(-0.1), math.exp(math.hypot(0.1, math.log(2.35)))))
    assert [wide.covers(ratio) for ratio in (-0.11, -0.09, 0.8, 0.9)] == [False, True, True, False]
    assert wide.half == pytest.approx((high - low) / (high + low))
    assert Width(0.1, (), 7).with_network(0.9, 64, measured=True) == Width(0.1, (), 7)


def test_what_the_network_explains_is_no_evidence_for_the_rest() -> None:
    slow = [a_row(0.5, source=s, network_share=0.6, nodes=16, gpus=64) for s in "abc"]
    assert width_of(Quantity.TIME, (), rows=slow).log == 0
    fast = [a_row(-0.2, source=s, network_share=0.6, nodes=16, gpus=64) for s in "abc"]
    assert width_of(Quantity.TIME, (), rows=slow + fast).log == 0.2
    above = a_row(1.2, network_share=0.6, nodes=16, gpus=64)
    width = Width(above.needed, (), 1).with_network(0.6, 64)
    assert [width.covers(ratio) for ratio in (1.2 - 1e-6, 1.2 + 1e-6)] == [True, False]


_REGIMES: dict[str, Callable[[Residual], bool]] = {
    "one node": lambda row: row.nodes == 1 and not row.retries,
    "nodes, collectives hidden": lambda row: row.nodes > 1 and row.network_share < 0.35 and not row.retries,
    "nodes, collectives decide": lambda row: row.network_share >= 0.35 and not row.retries,
    "chip without runs": lambda row: row.condition is Condition.NEW_CHIP,
    "known software and chip": lambda row: row.condition is Condition.KNOWN,
}


@pytest.mark.parametrize("regime", _REGIMES)
def test_runs_of_each_regime_lie_inside_with_their_source_held_out(regime: str) -> None:
    runs = [row for row in read_table() if row.condition in AS_IT_WAS and row.quantity is Quantity.TIME]
    assert len(runs) > 220
    inside = [width_of_run(row).covers(row.log_ratio) for row in runs if _REGIMES[regime](row)]
    assert len(inside) >= 40
    assert statistics.fmean(inside) >= 0.85


def test_known_runs_have_narrow_intervals() -> None:
    known = [
        row for row in read_table() if row.condition is Condition.KNOWN and row.quantity is Quantity.TIME
    ]
    assert statistics.median(width_of_run(row).half for row in known) <= 0.12
    assert width_of(Quantity.TIME, ()).half <= 0.08
    assert len({row.source for row in known if is_held_out(row)}) >= 4


def test_chips_and_software_without_runs_are_wider() -> None:
    known = width_of(Quantity.TIME, ()).log
    for reason in Unknown:
        assert width_of(Quantity.TIME, (reason,)).log >= known
    assert width_of(Quantity.TIME, (Unknown.CHIP,)).log > 2 * known
    assert width_of(Quantity.TIME, (Unknown.MEMORY,)).log > 2 * known


def test_the_docs_have_the_widths_of_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "validation.md").read_text()

    def half(*unknown: Unknown) -> str:
        share = 100 * math.tanh(width_of(Quantity.TIME, unknown).log)
        return f"| {share:.1f} % |" if share < 10 and not unknown else f"| {share:.0f} % |"

    rows = {
        "one node, or the network in a profile of yours": half(),
        "several nodes, network not stated": half(Unknown.NETWORK),
        "today's software": half(Unknown.SYSTEM),
        "a chip without published runs": half(Unknown.CHIP),
        "the allocator retries": half(Unknown.MEMORY),
    }
    for case, width in rows.items():
        (line,) = [line for line in text.splitlines() if line.startswith("| ") and case in line][:1]
        assert width in line
