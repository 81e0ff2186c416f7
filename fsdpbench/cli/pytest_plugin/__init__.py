"""The pytest plugin: training code of a test on simulated GPUs and on real CPU ranks (docs/how-to/pytest.md).

`hooks.py`, which every pytest of the environment imports, is light: torch and the bench come with a run.
"""

from typing import Any

import pytest

CURRENT = pytest.StashKey[pytest.Item]()
"""The test that runs, or for which a fixture is set up."""
RUNS = pytest.StashKey[list[Any]]()
"""The simulated runs of a test."""
