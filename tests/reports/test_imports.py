"""`reports` works without torch, and loads what is heavy only where it is used."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, fsdpbench.reports.analysis.text, fsdpbench.reports.analysis.analyze
import fsdpbench.reports.readers.hta, fsdpbench.reports.readers
unwanted = {"torch", "hta", "scipy", "plotly", "pandas"}
higher = {name for name in sys.modules if name.startswith("fsdpbench.")}
below = tuple(f"fsdpbench.{name}" for name in ("reports", "base"))
higher = {name for name in higher if not name.startswith(below)}
print(*sorted(unwanted & set(sys.modules)), *sorted(higher))
"""


def test_nothing_heavy_and_nothing_higher_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
