"""Tokens, days, GPU-hours and cost by number of GPUs: the arithmetic, and the commands that print it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.cli.terminal.by_count import Budget, parse_tokens, print_endured, rows_by_count, short, span
from fsdpbench.sweep.prediction import PROBE


def config(gpus: int, batch: int = 1) -> Config:
    settings = Settings.of(batch=batch)
    return Config("gpt-tiny", {}, "torch-fsdp2", "sim", "h100-80gb", gpus, 8, settings, PROBE)


def test_the_best_of_each_count_has_days_hours_and_cost() -> None:
    found = [(config(8), 900.0), (config(8, 2), 1000.0), (config(64), 800.0)]
    few, many = rows_by_count(found, "tokens", Budget(tokens=1e12, price=2.0))
    assert (few.config.settings.batch, few.rate, few.efficiency) == (2, 8000.0, 1.0)
    assert few.a_day == 8000 * 24 * 3600
    assert few.days == pytest.approx(1e12 / 8000 / 86400)
    assert few.gpu_hours == pytest.approx(1e12 / 1000 / 3600), "the rate a GPU decides"
    assert few.cost == pytest.approx(2 * 1e12 / 1000 / 3600)
    assert (many.rate, many.efficiency) == (51_200.0, 0.8)
    assert many.gpu_hours == pytest.approx(few.gpu_hours / 0.8)
    assert few.days_in_all is not None
    assert few.days_in_all > few.days


def test_without_tokens_the_cost_is_that_of_a_day() -> None:
    (row,) = rows_by_count([(config(8), 10.0)], "samples", Budget(price=3.0))
    assert (row.days, row.gpu_hours, row.cost) == (None, None, 3.0 * 24 * 8)


@pytest.mark.parametrize(
    ("mtbf_h", "words"),
    [(None, "days of computing"), (1e-3, "never ends: a failure every 0.45 s")],
    ids=["published", "absurd"],
)
def test_the_fastest_is_said_with_failures(mtbf_h: float | None, words: str, capsys: Any) -> None:
    print_endured(rows_by_count([(config(8), 1000.0)], "tokens", Budget(1e9, gpu_mtbf_h=mtbf_h)))
    assert words in capsys.readouterr().out


def test_a_rate_of_failures_without_days_is_refused() -> None:
    with pytest.raises(UsageError, match="name its --tokens"):
        Budget.of(None, None, 5.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.5, "0.5 s"), (34.2, "34 s"), (110, "110 s"), (140, "2.33 min"), (7200, "2 h"), (9e6, "104 days")],
)
def test_times_have_a_unit_of_their_size(seconds: float, words: str) -> None:
    assert span(seconds) == words


@pytest.mark.parametrize(("text", "count"), [("1T", 1e12), ("300b", 3e11), ("2e12", 2e12), ("1.5 t", 1.5e12)])
def test_tokens_are_written_as_people_do(text: str, count: float) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "many", "0", "-1T", "1.2.3B", "1Q", "1e99T"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--tokens"):
        parse_tokens(text)


def test_large_numbers_are_short() -> None:
    assert [short(count) for count in (1e12, 9.76e10, 2.5e15, 5400)] == ["1 T", "97.6 B", "2,500 T", "5.4 k"]


def test_a_model_without_tokens_is_told_before_anything_runs(fsdpbench: Any) -> None:
    done = fsdpbench("plan", "--model", "regnet-tiny", "--tokens", "1T", "--device", "sim")
    assert done.returncode == 2
    assert "has samples, not tokens" in done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_the_commands_answer_by_count(command: str, fsdpbench: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--model gpt-tiny --device sim --gpus 8,16 --batch 1,8 --tokens 1B --price 2"
    rows = json.loads(fsdpbench(command, *words.split(), "--json").stdout)["by_gpus"]
    assert [row["gpus"] for row in rows] == [8, 16]
    assert all("batch-8" in row["best"] for row in rows)
    assert "By number of GPUs" in fsdpbench(command, *words.split()).stdout
