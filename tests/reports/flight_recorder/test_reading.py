"""Files from elsewhere: what is a dump, and that none runs code, asks for much or ends in a traceback."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dump_writing import dump, entry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpbench.reports.analysis.flight_recorder import describe, judge
from fsdpbench.reports.readers import TraceError
from fsdpbench.reports.readers.flight_recorder import find_dumps, read_dump

if TYPE_CHECKING:
    from conftest import WriteDumps

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WHOLE = pickle.dumps(dump([entry(1), entry(2, state="started")]), protocol=2)


class _Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path(os.environ["TARGET"])),)


def test_the_json_form_says_the_same(tmp_path: Path) -> None:
    content = dump([entry(1), entry(2, state="started")])
    (tmp_path / "nccl_trace_rank_5").write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "rank_5.json").write_text(json.dumps(content))
    pickled, as_json = (read_dump(tmp_path / name, 5) for name in ("nccl_trace_rank_5", "rank_5.json"))
    assert pickled.entries == as_json.entries
    assert pickled.members == as_json.members == {"0": (0, 1, 2)}


def test_folders_and_files_are_known_by_their_content(tmp_path: Path, write_dumps: WriteDumps) -> None:
    written = write_dumps({rank: dump([entry(1)]) for rank in (0, 1, 10)})
    (tmp_path / "notes_3").write_text("no dump")
    (tmp_path / "trace_4").write_text('{"traceEvents": [], "pg_config": 1}')
    (tmp_path / "snapshot_5.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    assert find_dumps([tmp_path]) == written
    assert find_dumps([written[0], written[10]]) == {0: written[0], 10: written[10]}
    assert find_dumps([tmp_path / "notes_3"]) == {}
    with pytest.raises(TraceError, match="is not a Flight Recorder dump like the others"):
        find_dumps([written[0], tmp_path / "notes_3"])


def test_two_dumps_of_a_rank_and_one_without_a_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a_1", "b_1", "last"):
        (tmp_path / name).write_bytes(WHOLE)
    with pytest.raises(TraceError, match="is a second dump of rank 1"):
        find_dumps([tmp_path])
    with pytest.raises(TraceError, match="whose name ends in no rank"):
        find_dumps([tmp_path / "last"])


def test_a_pickle_with_code_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TARGET", str(tmp_path / "made"))
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump([entry(1, frames=_Command())]), protocol=2))
    with pytest.raises(TraceError, match=r"it holds posix\.mkdir, and plain values only are read"):
        judge(find_dumps([path]))
    assert not (tmp_path / "made").exists()


def test_a_pickle_that_asks_for_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(b"\x80\x02}X\x09\x00\x00\x00pg_configr\xff\xff\xff\x7f.")
    with pytest.raises(TraceError, match="more memory than its size explains"):
        read_dump(path, 0)


@pytest.mark.parametrize("length", [2, 40, len(WHOLE) // 2, len(WHOLE) - 1])
def test_a_truncated_dump_is_one_line(tmp_path: Path, length: int) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(TraceError, match="truncated") as refusal:
        read_dump(path, 0)
    assert "\n" not in str(refusal.value)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_bytes_end_in_a_verdict_or_one_line(tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for place, value in damage:
        content[place] = value
    _judged(tmp_path, bytes(content))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_FIELDS = st.dictionaries(st.sampled_from(sorted(entry(1))), _VALUES, max_size=4)


@FUZZ
@given(
    st.lists(_FIELDS | _VALUES, max_size=4),
    st.dictionaries(st.sampled_from(["pg_config", "pg_status", "version"]), _VALUES),
)
def test_values_of_any_type_end_in_a_verdict_or_one_line(
    tmp_path: Path, changes: list[Any], beside: dict[str, Any]
) -> None:
    entries: list[Any] = [
        {**entry(number), **change} if isinstance(change, dict) else change
        for number, change in enumerate(changes)
    ]
    _judged(tmp_path, pickle.dumps({**dump(entries), **beside}, protocol=2))


def _judged(folder: Path, content: bytes) -> None:
    """Beside a whole dump of another rank: a verdict that can be shown and written, or a line."""
    paths = {0: folder / "nccl_trace_rank_0", 1: folder / "nccl_trace_rank_1"}
    paths[0].write_bytes(WHOLE)
    paths[1].write_bytes(content)
    message = ""
    try:
        verdict = judge(paths)
        message = describe(verdict)
        json.dumps(verdict.to_dict(), allow_nan=False)
    except TraceError as error:
        message = str(error)
        assert_one_line(message)
    assert message


def assert_one_line(message: str) -> None:
    assert message.isprintable()
