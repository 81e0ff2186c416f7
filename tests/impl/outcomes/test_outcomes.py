"""Every situation of the tables ends on ours as on torch's, or differs as a document says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from flat_programs import Side
from outcomes import flat_known, sharded_known
from outcomes.rows import Difference, Known, Row, differences

ROOT = Path(__file__).resolve().parents[3]
FLAT = ("wrapping", "module", "calling", "training", "saving")
TABLES = {f"flat_{name}_rows": flat_known for name in FLAT} | {"sharded_rows": sharded_known}


def rows_of(table: str) -> list[Row]:
    rows: list[Row] = import_module(f"outcomes.{table}").TABLE.rows
    return rows


def run_rows(rank: int, *, table: str, names: Sequence[str]) -> list[Difference]:
    chosen = [row for row in rows_of(table) if row.name in names]
    return differences(chosen, lambda kind, mode: Side(kind, rank, mode))


def unexplained(found: Sequence[Difference], known: Sequence[Known]) -> list[Difference]:
    return [each for each in found if not any(k.covers(each.name, each.torch, each.impl) for k in known)]


def run(pool: Any, table: str, names: Sequence[str]) -> list[Difference]:
    """Differences of both ranks, in parts: a hang names its rows."""
    found: list[Difference] = []
    for start in range(0, len(names), 40):
        part = names[start : start + 40]
        for each in pool.run_everywhere(run_rows, timeout=120, table=table, names=part):
            found += each
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("table", TABLES)
def test_quick_rows(two_ranks, table: str) -> None:
    names = [row.name for row in rows_of(table) if row.quick]
    assert names
    assert not unexplained(run(two_ranks, table, names), TABLES[table].KNOWN)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_all_rows(two_ranks) -> None:
    """Also that each known difference is one, so that none is left over."""
    only = os.environ.get("OUTCOMES", "")
    found = {
        table: run(two_ranks, table, [row.name for row in rows_of(table) if only in row.name])
        for table in TABLES
    }
    failed = [str(d) for table in TABLES for d in unexplained(found[table], TABLES[table].KNOWN)]
    assert not failed, "\n".join(failed)
    everything = {
        module: [d for t in TABLES if TABLES[t] is module for d in found[t]] for module in TABLES.values()
    }
    for module, all_found in everything.items() if not only else ():
        unused = [k for k in module.KNOWN if not any(k.covers(d.name, d.torch, d.impl) for d in all_found)]
        assert not unused, unused


@pytest.mark.parametrize("module", [flat_known, sharded_known], ids=["flat", "sharded"])
def test_known_differences_are_documented(module: Any) -> None:
    text = " ".join((ROOT / module.DOCUMENT).read_text().split())
    missing = [known.words for known in module.KNOWN if known.words not in text]
    assert not missing


def test_names_occur_once() -> None:
    names = [row.name for table in TABLES for row in rows_of(table)]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


def test_what_differs_is_seen() -> None:
    def program(side: str) -> None:
        if side == "impl":
            raise ValueError

    rows = [Row("raises", program)]
    found = differences(rows, lambda kind, mode: kind)
    assert found == [Difference("raises", False, "done", "ValueError")]
    assert unexplained(found, [Known("raises", "done", "TypeError", "")]) == found
    assert not unexplained(found, [Known("rai.*", "done", "ValueError", "")])
    assert torch.initial_seed() == 0
