"""Analysis of traces: overlap, phases, collectives, FSDP units, memory, ranks."""

from fsdpbench.reports.analysis.analyze import analyze, analyze_trace
from fsdpbench.reports.analysis.figures import CollectiveFigures, TimeParts
from fsdpbench.reports.analysis.memory import MemoryAnalysis
from fsdpbench.reports.analysis.model import Analysis, RankAnalysis, RanksSummary, UnitAnalysis
