"""`reports` works without torch, and loads what is heavy only where it is used."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, reports, reports.analysis.text, reports.timeline, reports.hta_check, reports.trace
unwanted = {"torch", "hta", "scipy", "plotly", "pandas", "impl", "fsdpbench", "workloads"}
print(*sorted(unwanted & set(sys.modules)))
"""


def test_nothing_heavy_and_nothing_higher_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
