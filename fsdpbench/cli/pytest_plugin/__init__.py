"""The pytest plugin: training code of a test on simulated GPUs and on real CPU ranks (docs/how-to/pytest.md).

hooks.py       options, the mark, fixtures; light, since every pytest of the environment imports it
runs.py        a function or a script on ranks of its own, and what came of it
budgets.py     figures that a run may not exceed
baselines.py   figures that were committed, compared as the gate does
"""

from fsdpbench.cli.pytest_plugin.runs import FailedRunError, GlooRanks, SimulatedCluster, SimulatedRun

__all__ = ["FailedRunError", "GlooRanks", "SimulatedCluster", "SimulatedRun"]
