"""`python ci/operator_prices.py`: prices of isolated operators beside measured ones."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fsdpbench.base.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ci"))
from operator_prices import command

SAMPLES = Path(__file__).parents[2] / "data" / "operators"
GEMM = "gpu,measured_with,dtype,m,n,k,us\n"


@pytest.fixture
def prices() -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(command, [*map(str, arguments)])


def test_every_row_is_priced_and_every_group_has_its_errors(prices: Callable[..., Result]) -> None:
    done = prices(SAMPLES, "--json")
    assert done.exit_code == int("**not met**" in prices(SAMPLES).stdout)
    printed = json.loads(done.stdout)
    assert len(printed["rows"]) == sum(len(path.read_text().splitlines()) - 1 for path in SAMPLES.iterdir())
    assert {row["gpu"] for row in printed["rows"]} >= {"b300", "gb200", "gb300", "rtx-pro-6000", "l40s"}
    assert printed["skipped"] == []
    for group in printed["groups"]:
        assert list(group) == [
            "kind", "gpu", "dtype", "measured_with", "count", "mean_error", "median_error", "bias",
        ]  # fmt: skip
    row = next(row for row in printed["rows"] if row["kind"] == "gemm")
    assert row["error"] == pytest.approx(row["predicted_us"] / row["us"] - 1)
    of_row = [
        r["error"]
        for r in printed["rows"]
        if all(r.get(key) == row[key] for key in ("kind", "gpu", "dtype", "measured_with"))
    ]
    group = next(
        g
        for g in printed["groups"]
        if all(g[key] == row[key] for key in ("kind", "gpu", "dtype", "measured_with"))
    )
    assert group["count"] == len(of_row)
    assert group["bias"] == pytest.approx(sum(of_row) / len(of_row))


def test_the_text_names_bars_collectives_and_sizes(prices: Callable[..., Result]) -> None:
    shown = prices(SAMPLES).stdout
    assert "collectives of 1 MiB and more, mean error | at most 5%" in shown
    assert "nccl reduce_scatter" in shown
    assert "less than 10 us" in shown


def test_a_chip_without_a_profile_is_named(tmp_path: Path, prices: Callable[..., Result]) -> None:
    (tmp_path / "gemm.csv").write_text(
        GEMM + "mi325x,vllm 1,bfloat16,64,256,256,5\nb200,trtllm 1,fp8,64,256,256,5\n"
    )
    shown = prices(tmp_path)
    assert "Skipped: mi325x, 1 row: no hardware profile has this name." in shown.stdout
    printed = json.loads(prices(tmp_path, "--json").stdout)
    assert printed["skipped"] == [{"gpu": "mi325x", "rows": 1}]
    assert len(printed["rows"]) == 1


def test_a_bar_that_is_not_met_is_exit_code_1(tmp_path: Path, prices: Callable[..., Result]) -> None:
    (tmp_path / "gemm.csv").write_text(GEMM + "b200,trtllm 1.3,bfloat16,4096,4096,4096,900\n")
    done = prices(tmp_path)
    assert done.exit_code == 1
    assert "**not met**" in done.stdout


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b200,trtllm 1,bfloat16,x,256,256,5", "line 2: m is 'x', not a whole number of at least 1"),
        ("b200,trtllm 1,bfloat16,0,256,256,5", "line 2: m is '0'"),
        ("b200,trtllm 1,bfloat16,64,256,256,nan", "line 2: us is 'nan', not a positive number"),
        ("b200,trtllm 1,bfloat16,64,256", "line 2: k is ''"),
        ("b200,trtllm 1,int8,64,256,256,5", "line 2: dtype is 'int8', not one of bfloat16, fp8, nvfp4"),
        (",trtllm 1,fp8,64,256,256,5", "line 2: gpu is '', not a name"),
    ],
)
def test_a_bad_row_names_file_line_and_column(
    tmp_path: Path, prices: Callable[..., Result], row: str, message: str
) -> None:
    (tmp_path / "gemm.csv").write_text(GEMM + row + "\n")
    failed = prices(tmp_path).exception
    assert isinstance(failed, UsageError)
    assert f"{tmp_path / 'gemm.csv'}, {message}" in str(failed)
    assert "\n" not in str(failed)


def test_bad_folders_and_columns(tmp_path: Path, prices: Callable[..., Result]) -> None:
    assert "holds none of nccl.csv" in str(prices(tmp_path).exception)
    assert "is not a folder" in str(prices(tmp_path / "none").exception)
    (tmp_path / "nccl.csv").write_text("gpu,op\n")
    assert "line 1: lacks the columns nccl, gpus, bytes, us" in str(prices(tmp_path).exception)


def test_a_part_of_the_files_is_enough(tmp_path: Path, prices: Callable[..., Result]) -> None:
    shutil.copy(SAMPLES / "nccl.csv", tmp_path)
    printed = json.loads(prices(tmp_path, "--json").stdout)
    assert {group["kind"] for group in printed["groups"]} == {"nccl"}
