"""`--try-compiled`: which configuration runs compiled as well, and how its wish reaches the fork server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.options import asks_to_compile
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.reports.result import Result, Status
from fsdpbench.sweep.recommended import compiled_beside_best


def config(system: str = "torch-fsdp2", **settings: Any) -> Config:
    return Config(
        model="gpt-tiny", shape={}, system=system, device="sim", hardware="h100-80gb", gpus=8,
        gpus_per_node=8, settings=Settings.of(**settings), measurement=Measurement.default_for("sim"),
    )  # fmt: skip


def store(rates: dict[str, float | None]) -> Any:
    """A store of results: tokens a second by key; None ran out of memory."""
    results = (
        Result(status=Status.OK if rate else Status.OOM, tokens_per_s_per_gpu=rate) for rate in rates.values()
    )
    points = [SimpleNamespace(key=key, result=result) for key, result in zip(rates, results, strict=True)]
    return SimpleNamespace(points=lambda: points)


def test_the_best_that_finished_is_compiled() -> None:
    points = [config(batch=batch) for batch in (1, 2, 4)]
    rates = dict(zip(map(content_key, points), (100.0, 300.0, None), strict=True))
    chosen, why_not = compiled_beside_best(store(rates), points)
    assert chosen is not None
    assert not why_not
    assert (chosen.settings.batch, chosen.settings.compile) == (2, True)


def test_why_nothing_is_compiled() -> None:
    eager, compiled = config(), config(compile=True)
    assert (
        compiled_beside_best(store({}), [eager, compiled])[1] == "compile is among the settings of this sweep"
    )
    assert compiled_beside_best(store({content_key(eager): None}), [eager])[1] == "no configuration finished"
    other = replace(config("deepspeed-zero3"), device="cuda", hardware=None)
    assert "hooks" in compiled_beside_best(store({content_key(other): 1.0}), [other])[1]


@pytest.mark.parametrize(
    ("flags", "assignments", "expected"),
    [
        ({}, (), False),
        ({"compile": "false"}, (), False),
        ({"compile": "false,true"}, (), True),
        ({}, ("compile=on",), True),
        ({}, ("compile = false, yes",), True),
        ({}, ("seq=1",), False),
    ],
)
def test_a_quick_look_for_compile(flags: Any, assignments: Any, expected: bool) -> None:
    assert asks_to_compile(flags, assignments) is expected


def test_a_quick_look_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text('model = "gpt-tiny"\n[settings]\ncompile = [false, true]\n')
    assert asks_to_compile({}, (), str(path))
