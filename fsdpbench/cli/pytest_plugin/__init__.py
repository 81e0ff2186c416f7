"""The pytest plugin: training code of a test on simulated GPUs and on real CPU ranks (docs/how-to/pytest.md).

`hooks.py`, which every pytest of the environment imports, is light: torch and the bench come with a run.
"""
