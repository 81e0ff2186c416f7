"""What all tests share: a skip for want of a Debian package is a failure where CI says so."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With FSDPBENCH_FORBID_SKIPS=1, as in CI, a test that asks for a missing Debian package fails."""
    report = yield
    forbidden = os.environ.get("FSDPBENCH_FORBID_SKIPS") == "1"
    if forbidden and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "Debian package" in reason:
            report.outcome = "failed"
            report.longrepr = f"skips are forbidden here: {reason}"
    return report
