"""The fork server is started first: until then a command may import nothing that takes long."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORTED = (
    "import sys, fsdpbench.cli.commands.{name}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
)


@pytest.mark.parametrize("name", ["run", "sweep", "plan", "tune", "check", "validate"])
def test_commands_that_start_points_load_nothing_heavy_first(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED.format(name=name)], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
