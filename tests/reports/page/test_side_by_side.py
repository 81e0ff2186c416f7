"""Ratios of systems on the same work, and losses that are not the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.pages.comparisons import differences, ratios
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.result import ConfigFile, Repeats, Result
from fsdpbench.reports.result import Status as Ended


def row(
    system: str, step_s: float | list[float], loss: list[float] | None = None, **settings: Any
) -> Configuration:
    runs = step_s if isinstance(step_s, list) else []
    step = sorted(runs)[len(runs) // 2] if isinstance(step_s, list) else step_s
    batch = settings.get("batch", 4)
    result = Result(
        status=Ended.OK, device="cpu", step_time_s=step, loss=loss,
        samples_per_s_per_gpu=batch / step / settings.get("tp", 1) / settings.get("cp", 1),
        repeats=Repeats(runs=len(runs), step_time_s=runs) if runs else None,
    )  # fmt: skip
    together = {"system": system, "model": "gpt-tiny", "batch": batch, "param_dtype": "fp32", **settings}
    folder = Path(f"{system}-{sorted(settings.items())}")
    return Configuration(
        folder, ConfigFile(settings={}, name=folder.name), result, Status.OK, settings=together
    )


def view(*rows: Configuration) -> RunView:
    return RunView(Path("run"), "run", rows)


def test_each_systems_best_row_against_pytorchs() -> None:
    found = ratios(
        view(
            row("mine", 1.0, wrap="block"),
            row("mine", 0.5, wrap="root"),
            row("torch-fsdp1", 0.75),
            row("slow", 3.0),
        )
    )
    assert [(each.system, each.ratio) for each in found] == [
        ("torch-fsdp1", 1.0), ("mine", pytest.approx(1.5)), ("slow", pytest.approx(0.25)),
    ]  # fmt: skip
    assert {each.reference for each in found} == {"torch-fsdp1"}
    assert {each.rounds for each in found} == {1}


def test_rounds_are_compared_one_by_one() -> None:
    """A machine that is twice as slow in the second round is so for both."""
    found = ratios(view(row("torch-ddp", [1.0, 2.0, 1.1]), row("mine", [0.8, 1.6, 1.1])))
    mine = found[1]
    assert (mine.ratio, mine.low, mine.high, mine.rounds) == (1.25, pytest.approx(1.0), 1.25, 3)


def test_rounds_that_do_not_pair_are_compared_by_their_medians() -> None:
    mine = ratios(view(row("torch-ddp", [1.0, 2.0, 3.0]), row("mine", [1.0])))[1]
    assert (mine.ratio, mine.rounds) == (2.0, 1)


@pytest.mark.parametrize("settings", [{"tp": 4}, {"cp": 4}])
def test_fewer_samples_a_step_are_no_faster_system(settings: dict[str, Any]) -> None:
    usual = (row("torch-fsdp2", 1.0, [5.0]), row("mine", 0.8, [5.0]))
    shared = (row("torch-fsdp2", 0.5, [4.0], **settings), row("mine", 0.49, [4.0], **settings))
    found = view(*usual, *shared)
    assert [each.ratio for each in ratios(found)] == [1.0, pytest.approx(1.25)]
    assert differences(found) == []


@pytest.mark.parametrize(
    "settings", [{"lora": 16}, {"optimizer_dtype": "bf16"}, {"implementation": "transformers"}]
)
def test_other_training_is_not_compared(settings: dict[str, Any]) -> None:
    found = view(row("torch-fsdp2", 1.0, [5.0]), row("mine", 0.5, [4.0], **settings))
    assert ratios(found) == []
    assert differences(found) == []


def test_other_work_is_not_compared() -> None:
    assert ratios(view(row("a", 1.0, batch=4), row("b", 1.0, batch=8))) == []
    assert ratios(view(row("a", 1.0), row("a", 2.0, wrap="root"))) == []
    apart = view(row("a", 1.0, [3.0], batch=4), row("b", 1.0, [5.0], batch=8))
    assert differences(apart) == []


def test_the_first_step_that_differs_is_named() -> None:
    rows = (row("torch-ddp", 1.0, [4.0, 3.0, 2.0]), row("wrong", 0.1, [4.0, 3.0, 2.5, 1.0]))
    (found,) = differences(view(*rows, row("right", 1.0, [4.0, 3.00001])))
    assert (found.step, found.loss, found.expected) == (3, 2.5, 2.0)
    assert "wrong computes something else than torch-ddp" in found.sentence
    told = {each.system: each.losses for each in ratios(view(*rows, row("right", 1.0, [4.0, 3.00001])))}
    assert told == {"torch-ddp": "equal", "wrong": "differ", "right": "equal"}


def test_low_precision_may_differ_a_little_and_no_loss_says_nothing() -> None:
    near = [row("torch-ddp", 1.0, [4.0], param_dtype="bf16"), row("mine", 1.0, [4.03], param_dtype="bf16")]
    assert differences(view(*near)) == []
    assert len(differences(view(near[0], row("mine", 1.0, [4.1], param_dtype="bf16")))) == 1
    silent = view(row("torch-ddp", 1.0), row("mine", 1.0))
    assert differences(silent) == []
    assert {each.losses for each in ratios(silent)} == {"-"}
