"""Two hundred configurations in one sweep, and a search in thousands, by the script that measures them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "ci" / "measure_engine.py"


def measured(what: str) -> dict[str, str]:
    """The lines that the script prints, by their first words."""
    done = subprocess.run([sys.executable, str(SCRIPT), what], capture_output=True, text=True, timeout=2500)
    assert done.returncode == 0, done.stderr
    pairs = (
        re.split(r"\s{2,}|(?<=time) |(?<=memory) |(?<=code) ", line, maxsplit=1)
        for line in done.stdout.splitlines()
    )
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_two_hundred_configurations_keep_their_traces_in_six_gigabytes() -> None:
    found = measured("sweep")
    assert found["exit code"] == "0"
    statuses = {name: int(count) for name, count in re.findall(r"'(\w+)': (\d+)", found["results"])}
    assert sum(statuses.values()) == 200
    assert set(statuses) <= {"ok", "oom"}
    assert f"; {statuses['ok']} traces" in found["results"]
    assert float(found["peak memory"].split()[0]) < 6.0


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_a_search_in_thousands_ends() -> None:
    found = measured("tune")
    assert found["exit code"] == "0"
    assert float(found["peak memory"].split()[0]) < 6.0
