"""What plans and traces on disk depend on of the simulator itself."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_COMPILER = Path(__file__).parent


@functools.cache
def of_compiler() -> str:
    """A digest of what makes plans, as it is when the process, or the server behind it, first asks."""
    return _digest(_COMPILER)


@functools.cache
def sources() -> str:
    """A digest of the whole simulator, whose operators and patches are what Dynamo traces."""
    of_compiler()
    return _digest(_COMPILER.parent)


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(map(str, folder.rglob("*.py"))):
        with open(path, "rb") as file:
            found.update(file.read())
    return found.hexdigest()[:16]
