"""What ran, by kernel, operator and module: how often, how long, and how near to what the chip could do."""

from fsdpbench.reports.analysis.operators.calls import Chip
from fsdpbench.reports.analysis.operators.tables import WorkTables, work_tables

__all__ = ["Chip", "WorkTables", "work_tables"]
