"""What the atlas says of a cell, how it is looked up, and what its pages show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsdpbench.answers.atlas.answers import answered
from fsdpbench.answers.atlas.lookup import Atlas, find, read_atlas, write_pages
from fsdpbench.answers.atlas.space import Cell
from fsdpbench.base.errors import UsageError
from fsdpbench.reports.result import Cause, Result, Status


@pytest.fixture
def told(ran: Callable[..., Any], out_of_memory: Callable[[], Any]) -> Callable[[Any], Any]:
    """8 GPUs: nothing fits. 16 GPUs: the more recomputed the slower; risky where nothing is recomputed."""

    def tell(config: Any) -> Any:
        if config.gpus == 8:
            return out_of_memory()
        rate = {"none": 120.0, "op": 100.0, "full": 99.0}[config.settings.activation_checkpointing]
        risky = config.settings.activation_checkpointing == "none"
        return ran(rate - (30 if config.settings.strategy == "SHARD_GRAD_OP" else 0), risky)

    return tell


@pytest.fixture
def content(
    two_cells: list[Cell], worked_off: Callable[..., Any], told: Callable[[Any], Any]
) -> dict[str, Any]:
    return msgspec.to_builtins(answered(two_cells, worked_off(two_cells, told)))


@pytest.fixture
def built(content: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "atlas").mkdir()
    (tmp_path / "atlas" / "atlas.json").write_text(json.dumps(content))
    write_pages(tmp_path / "atlas", msgspec.convert(content, Atlas))
    return tmp_path / "atlas"


def test_the_best_is_the_fastest_without_risk(content: dict[str, Any]) -> None:
    cell = content["cells"][1]
    assert cell["best"]["settings"]["activation_checkpointing"] == "op"
    assert cell["best"]["interval"]["tokens_per_s_per_gpu"] == pytest.approx([90.0, 110.0])
    assert [each["tokens_per_s_per_gpu"] for each in cell["alternatives"]] == [100.0, 99.0]
    assert {each["tokens_per_s_per_gpu"] for each in cell["risky"]} == {120.0}
    assert all(each["risky"] for each in cell["risky"])
    assert "--gpus 16" in cell["best"]["command"]


def test_what_does_not_fit_says_so(content: dict[str, Any]) -> None:
    cell = content["cells"][0]
    assert (cell["status"], cell["best"]) == ("does_not_fit", None)
    assert "Tried to allocate 2 GiB" in cell["reason"]


def test_a_failure_is_not_out_of_memory(two_cells: list[Cell], worked_off: Callable[..., Any]) -> None:
    crashed = worked_off(two_cells, lambda config: Result(status=Status.CRASH, cause=Cause("it broke")))
    cell = msgspec.to_builtins(answered(two_cells, crashed))["cells"][0]
    assert (cell["status"], cell["reason"], cell["failed"]) == ("failed", "it broke", ["it broke"])


@pytest.mark.parametrize("name", ["llama-tiny", "Llama tiny", "llamatiny", "llama"])
def test_names_are_found_as_people_write_them(content: dict[str, Any], name: str) -> None:
    assert find(msgspec.convert(content, Atlas), name, "A100", 16).best is not None


@pytest.mark.parametrize(
    ("model", "hardware", "gpus", "error"),
    [
        ("gpt", "a100", 8, "unknown model 'gpt'"),
        ("llama", "h100", 8, "unknown hardware 'h100'"),
        ("llama", "a100", 64, "with 8, 16 GPUs, not 64"),
        ("", "a100", 8, "unknown model ''"),
    ],
)
def test_what_is_not_in_it_is_a_usage_error(
    content: dict[str, Any], model: str, hardware: str, gpus: int, error: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(error)):
        find(msgspec.convert(content, Atlas), model, hardware, gpus)


def test_an_ambiguous_name_is_refused(content: dict[str, Any]) -> None:
    content["hardware"] = ["a100-40gb", "a100-80gb"]
    with pytest.raises(UsageError, match="a100-40gb or a100-80gb"):
        find(msgspec.convert(content, Atlas), "llama", "a100", 8)


def test_show_runs_nothing_and_needs_no_torch(built: Path) -> None:
    program = (
        "import sys; from fsdpbench.answers.atlas import lookup; from pathlib import Path;"
        f"atlas = lookup.read_atlas(Path({str(built)!r})); cell = lookup.find(atlas, 'llama', 'a100', 16);"
        "print('\\n'.join(lookup.lines(atlas, cell))); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "HYBRID_SHARD, selective recomputation, batch 16, eager" in done.stdout


def test_show_prints_the_answer(fsdpbench: Any, built: Path) -> None:
    words = ["atlas", "show", "llama", "--hardware", "a100", "--gpus", "16", "--atlas", str(built)]
    shown = fsdpbench(*words)
    assert shown.returncode == 0
    assert "100 (90 to 110) tokens/s/GPU" in shown.stdout
    assert "1.0 (0.5 to 2.0) GiB reserved" in shown.stdout
    assert "faster but risky" in shown.stdout
    answer = json.loads(fsdpbench(*words, "--json").stdout)
    assert answer["best"]["tokens_per_s_per_gpu"] == 100.0
    unfit = fsdpbench("atlas", "show", "llama", "--hardware", "a100", "--gpus", "8", "--atlas", str(built))
    assert "does not fit on 8 GPUs; it fits on 16" in unfit.stdout


def test_a_broken_atlas_is_one_line_and_exit_2(fsdpbench: Any, tmp_path: Path) -> None:
    for text in ("", "[]", '{"schema": 1}', '{"schema": 1, "cells": 3}'):
        (tmp_path / "atlas.json").write_text(text)
        done = fsdpbench("atlas", "show", "llama", "--atlas", str(tmp_path))
        assert done.returncode == 2, text
        assert len(done.stderr.splitlines()) == 1
    with pytest.raises(UsageError, match="no atlas there"):
        read_atlas(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--models", "llama9"], "unknown model"),
        (["--gpus", "8,x"], "'x' is not a whole number"),
        (["--gpus", "12", "--models", "llama-tiny", "--hardware", "h200"], "does not fill nodes"),
        (["--hardware", ","], "names nothing"),
    ],
)
def test_what_cannot_be_built_is_said_first(
    fsdpbench: Any, tmp_path: Path, words: list[str], error: str
) -> None:
    done = fsdpbench("atlas", "build", *words, "-o", str(tmp_path / "atlas"))
    assert done.returncode == 2
    assert error in done.stderr
    assert not (tmp_path / "atlas").exists()


def test_pages_hold_every_cell_and_load_nothing(built: Path) -> None:
    overview, model = (built / "index.html").read_text(), (built / "llama-tiny.html").read_text()
    for page in (overview, model):
        assert page.count("<tr data-model=") == 2
        assert "does not fit on 8 GPUs; it fits on 16" in page
        assert not re.search(r'(?:src|href)="(?!#|data:|index\.html|llama-tiny\.html)', page)
    assert 'href="llama-tiny.html"' in overview


@pytest.mark.campaign
def test_an_atlas_is_built_and_built_again_without_a_run(fsdpbench: Any, tmp_path: Path) -> None:
    words = ["atlas", "build", "--models", "llama-tiny", "--hardware", "a100-80gb", "--gpus", "8,16"]
    first = fsdpbench(*words, "-o", str(tmp_path / "atlas"))
    assert first.returncode == 0, first.stderr
    content = (tmp_path / "atlas" / "atlas.json").read_text()
    assert [cell["status"] for cell in json.loads(content)["cells"]] == ["fits", "fits"]
    again = fsdpbench(*words, "-o", str(tmp_path / "atlas"))
    assert "are done already" in again.stderr
    assert "tokens/s/GPU" not in again.stderr
    assert (tmp_path / "atlas" / "atlas.json").read_text() == content
