"""Out-of-memory errors as texts and snapshots: messages, tracebacks, pickles; read without torch."""

from fsdpbench.reports.out_of_memory.log import OomReport, read_log
from fsdpbench.reports.out_of_memory.message import OomMessage, find_messages
from fsdpbench.reports.out_of_memory.snapshot import SnapshotOom, describe_snapshot, read_oom_snapshot
from fsdpbench.reports.out_of_memory.text import describe_report

__all__ = [
    "OomMessage",
    "OomReport",
    "SnapshotOom",
    "describe_report",
    "describe_snapshot",
    "find_messages",
    "read_log",
    "read_oom_snapshot",
]
