"""A second opinion on overlap from HolisticTraceAnalysis (package `traceinsight`, `import hta`; extra `hta`).

HTA is loaded only here, and only when called: it pulls in all of JupyterLab.  Its known traps are avoided:
times are not rounded to microseconds, the last step is kept, and synchronisation records, which it would
count as computation, are taken out.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

_NO_ROUNDING = "HTA_DISABLE_NS_ROUNDING"


class HtaMissingError(Exception):
    """HTA is not installed."""


def hta_available() -> bool:
    return importlib.util.find_spec("hta") is not None


def hta_overlap(traces: Mapping[int, Path | str]) -> dict[int, float]:
    """Overlap fraction by rank as HTA computes it, to its precision of 0.0001.

    Args:
        traces: trace file by rank; each must hold at least two `ProfilerStep#` annotations and a collective.

    Raises:
        HtaMissingError: the extra `hta` is not installed.
    """
    if not hta_available():
        raise HtaMissingError("HolisticTraceAnalysis is not installed: pip install 'fsdpbench[hta]'")
    os.environ[_NO_ROUNDING] = "1"
    from hta.configs.env_options import HTAEnvOptions
    from hta.trace_analysis import TraceAnalysis

    # Read once when HTA was first imported, perhaps by somebody else.
    HTAEnvOptions.instance().set_disable_ns_rounding(True)
    files = {rank: str(Path(path).resolve()) for rank, path in traces.items()}
    analysis = TraceAnalysis(trace_files=files, include_last_profiler_step=True)
    for rank, events in analysis.t.traces.items():
        sync = analysis.t.symbol_table.get_sym_id_map().get("cuda_sync", -1)
        analysis.t.traces[rank] = events[events["cat"] != sync]
    with warnings.catch_warnings():
        # HTA uses pandas in a way that pandas 2.2 announces to change.
        warnings.simplefilter("ignore", FutureWarning)
        table = analysis.get_comm_comp_overlap(visualize=False)
    return {int(row["rank"]): float(row["comp_comm_overlap_pctg"]) / 100 for _, row in table.iterrows()}
