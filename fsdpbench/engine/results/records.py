"""Rank records: `rank{r}_record.json` beside each trace, written atomically.

A rank writes its record once per outcome, and also before an out-of-memory error unwinds.
"""

import contextlib
from pathlib import Path

import msgspec

from fsdpbench.base.files.documents import read_json_object, to_json
from fsdpbench.base.reading import UnreadableError
from fsdpbench.base.writing import write_whole
from fsdpbench.reports.rank_record import RankRecord as RankRecord
from fsdpbench.reports.result import Status as Status

TRACE_FOLDER = "trace"
STEPS_FILE = "steps.txt"
"""A file in the folder of a running script that lists its finished steps in words."""


def write_record(record: RankRecord, folder: Path) -> Path:
    """Write `record` into `folder`/trace, replacing an earlier record of its rank."""
    path = record_path(folder, record.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(record.to_dict(), 1))
    return path


def record_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's record."""
    return folder / TRACE_FOLDER / f"rank{rank}_record.json"


def trace_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return folder / TRACE_FOLDER / f"rank{rank}_trace.json.gz"


def read_records(folder: Path) -> list[RankRecord]:
    """Return the ranks' records in `folder`, by rank; skip broken files of ranks that died while writing."""
    records = []
    for path in sorted((folder / TRACE_FOLDER).glob("rank*_record.json")):
        with contextlib.suppress(UnreadableError, msgspec.ValidationError):
            records.append(RankRecord.of(read_json_object(path)))
    return sorted(records, key=lambda record: record.rank)
