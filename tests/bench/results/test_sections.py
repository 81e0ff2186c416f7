"""Sections of a result: a type for who writes and who reads; older files lack keys, wrong ones are named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fsdpbench.base.result_sections import (
    GradientFinding,
    MemoryAccount,
    ObservedScript,
    Place,
    PlaceholderDecision,
    ScriptReport,
    ShardingCall,
    Wait,
)
from fsdpbench.reports.rank_record import RankRecord
from fsdpbench.reports.result import Result

PLACE = Place("/a/train.py", 12, "fully_shard(model)", (12, 12, 0, 18))


def read_back(record: RankRecord) -> RankRecord:
    return RankRecord.of(json.loads(json.dumps(record.to_dict())))


def test_what_a_rank_writes_is_what_a_reader_has() -> None:
    seen = ObservedScript(
        sharding=[ShardingCall.at(PLACE, count=3, arguments={"offload": False, "mesh": 1})],
        waits=[Wait.at(PLACE, per_step=1.0, called=PLACE)],
        checkpointing=PLACE,
    )
    script = ScriptReport(steps=7, observed=seen, peaks={"in training": 5})
    decisions = [PlaceholderDecision("/a/train.py", 3, "bool", True, 2)]
    record = RankRecord(0, 8, "sim", script=script, placeholder_decisions=decisions)
    record.memory_account = MemoryAccount(step=2, held_bytes={"parameters": 7})
    assert read_back(record) == record
    result = Result.of({"status": "ok", **record.optional})
    assert (result.script, result.placeholder_decisions) == (script, decisions)
    assert result.memory_account == record.memory_account
    assert result.observed is not None
    assert result.observed.sharding[0].short == "train.py:12"


def test_older_files_lack_keys() -> None:
    observed: dict[str, Any] = {"sharding": [{"api": "fully_shard", "file": "/a/train.py", "line": 4}]}
    found = Result.of({"status": "ok", "script": {"steps": 3, "observed": observed}})
    assert found.observed == ObservedScript(sharding=[ShardingCall("/a/train.py", 4)])
    assert found.content["script"]["observed"] == observed, "what was read is what is written again"
    assert Result.of({"status": "ok", "script": {"steps": 0}}).observed is None
    assert Result.of({"status": "ok"}).observed is None


@pytest.mark.parametrize(
    ("observed", "named"),
    [
        ({"waits": [{"per_step": "often"}]}, r"waits\[0\]\.per_step"),
        ({"gradients": {"findings": {}}}, r"gradients\.findings"),
        ({"sharding": [{"line": None}]}, r"sharding\[0\]\.line"),
    ],
)
def test_a_wrong_type_is_named(observed: dict[str, Any], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        Result.of({"status": "ok", "script": {"observed": observed}})


def test_a_finding_has_all_of_its_cause() -> None:
    content = msgspec.to_builtins(
        GradientFinding.at(PLACE, cause="off", switch="no_sync", kind="apart", count=2)
    )
    assert content["switch"] == "no_sync"
    assert msgspec.convert(content, GradientFinding).short == "train.py:12"
