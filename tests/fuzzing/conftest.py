"""Lets the tests of this folder, and the server of `forked_commands`, import its modules by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from forked_commands import CommandServer
from workshop import furnish


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandServer]:
    """Runs command lines, a tenth of a second each."""
    with CommandServer() as server:
        yield server


@pytest.fixture(scope="session")
def furnished(commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one valid file of each kind that a command reads, for a case to copy."""
    folder = tmp_path_factory.mktemp("furnished")
    furnish(folder, commands)
    return folder
