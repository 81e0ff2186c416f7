"""Tables of configurations: nothing is cut or wraps, and no name of a folder is in them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from rich.text import Text

from fsdpbench.cli.output import make_console, make_table
from fsdpbench.cli.terminal.table import Column, fitting, setting_columns, total
from fsdpbench.reports.pages.display import phrase, within

ROWS: list[dict[str, Any]] = [
    {"system": system, "batch": batch, "strategy": strategy, "compile": compiled, "reduce_dtype": dtype,
     "activation_checkpointing": mode, "wrap": wrap}
    for system in ("torch-fsdp2", "impl-fsdp2")
    for mode, batch in (("none", 8), ("op", 12), ("full", 32))
    for strategy, compiled, dtype, wrap in (
        ("FULL_SHARD", False, "fp32", "block"), ("SHARD_GRAD_OP", False, "fp32", "block"),
        ("FULL_SHARD", True, "fp32", "block"), ("FULL_SHARD", False, "bf16", "every-4"),
    )
]  # fmt: skip
PLACE = Column("#", [f"{number}=" for number in range(1, len(ROWS) + 1)])
FIGURES = [
    Column("tokens /s/GPU", ["11,019"] * len(ROWS)),
    Column("against the verdict's", ["−13.4 ±1.2 %"] * len(ROWS), weight=9),
    Column("step, ms", ["1,234.5"] * len(ROWS), weight=6),
    Column("reserved, GiB", ["72.1 risky"] * len(ROWS), weight=7),
]


@pytest.mark.parametrize("width", [80, 140])
def test_rows_are_one_line_each_at_usual_widths(width: int) -> None:
    columns, _ = fitting(PLACE, setting_columns(ROWS, ROWS), FIGURES, width)
    assert total(columns) <= width
    assert not any("\n" in cell for column in columns for cell in column.cells)
    assert "tokens /s/GPU" in [column.title for column in columns]
    wide = {column.title for column in fitting(PLACE, setting_columns(ROWS, ROWS), FIGURES, 200)[0]}
    assert {"checkpointing", "reduce", "compile", "step, ms"} <= wide


@pytest.mark.parametrize("width", [40, 60, 80, 110, 140])
def test_what_a_narrow_table_leaves_out_is_said_below_it(width: int) -> None:
    draw = random.Random(width)
    rows = draw.sample(ROWS, 12)
    settings = setting_columns(rows, rows)
    place = Column("#", [str(number) for number in range(len(rows))])
    figures = [Column(column.title, column.cells[:12], weight=column.weight) for column in FIGURES]
    columns, base = fitting(place, settings, figures, width)
    by_title = {column.title: column for column in columns}
    for index, row in enumerate(rows):
        for name, column in zip(row, setting_columns(ROWS, rows), strict=True):
            words = phrase(name, row[name])
            changed = " ".join(by_title["changed"].cells[index].split()) if "changed" in by_title else ""
            varies = column.title in [each.title for each in settings]
            assert not varies or column.title in by_title or words in changed or words in base


def test_lines_into_a_pipe_are_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence can be searched for; a table keeps the width that it is given."""
    sentence = "stays the recommendation " * 20
    console = make_console(width_of_pipe=80)
    for printed in (sentence, Text(sentence)):
        console.print(printed)
        assert capsys.readouterr().out.rstrip() == sentence.rstrip()
    console.print(make_table({"name": False, "words": False}, [("one", sentence)]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80


def test_phrases_are_those_of_the_field() -> None:
    said = {
        ("activation_checkpointing", "op"): "op checkpointing",
        ("activation_checkpointing", "none"): "no checkpointing",
        ("compile", True): "compiled",
        ("reduce_dtype", "bf16"): "bf16 reduction",
        ("batch", 12): "batch 12",
        ("limit_all_gathers", "off"): "no limiter",
        ("cpu_offload", True): "cpu offload",
        ("strategy", "HYBRID_SHARD"): "HYBRID_SHARD",
    }
    assert {pair: phrase(*pair) for pair in said} == said


@pytest.mark.parametrize("count", range(1, 9))
def test_a_line_ends_before_its_26th_word(count: int) -> None:
    words = itertools.cycle(["one two three four five", " six seven", " eight"])
    parts = list(itertools.islice(words, 3 * count))
    line = within(parts)
    assert len(line.split()) <= 25
    assert line.startswith(parts[0])
