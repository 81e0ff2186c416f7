"""What happened in a trace: overlap, phases, collectives, FSDP units, memory, ranks."""

from fsdpbench.reports.analysis.analyze import analyze, analyze_trace
from fsdpbench.reports.analysis.measures.memory import MemoryAnalysis
from fsdpbench.reports.analysis.model import (
    Analysis,
    CollectiveFigures,
    Problem,
    RankAnalysis,
    RanksSummary,
    StepAnalysis,
    UnitAnalysis,
)
from fsdpbench.reports.analysis.time_parts import TimeParts

__all__ = [
    "Analysis",
    "CollectiveFigures",
    "MemoryAnalysis",
    "Problem",
    "RankAnalysis",
    "RanksSummary",
    "StepAnalysis",
    "TimeParts",
    "UnitAnalysis",
    "analyze",
    "analyze_trace",
]
