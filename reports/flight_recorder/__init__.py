"""Dumps of PyTorch's Flight Recorder: which rank did not join which collective.

With `TORCH_FR_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1` every rank of a job that hangs leaves a
file `nccl_trace_rank_3`: the last collectives that it called, with sizes, dtypes, states and Python frames.

================  =====================================================================================
`find.py`         which files are dumps, by what is in them
`reading.py`      a dump's bytes (a pickle of plain values, or JSON) as a `Dump`
`dump.py`         a `Dump` and its entries
`matching.py`     the same collective on all ranks: who is missing, whose call differs, who waits for whom
`verdict.py`      all of that of a job, and the likely culprit
`text.py`         in words
================  =====================================================================================
"""

from __future__ import annotations

from fsdpbench.reports.flight_recorder.find import find_dumps
from fsdpbench.reports.flight_recorder.reading import read_dump
from fsdpbench.reports.flight_recorder.text import describe
from fsdpbench.reports.flight_recorder.verdict import Verdict, judge

__all__ = ["Verdict", "describe", "find_dumps", "judge", "read_dump"]
