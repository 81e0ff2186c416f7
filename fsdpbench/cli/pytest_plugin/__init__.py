"""The pytest plugin: run training code of a test on simulated GPUs or real CPU ranks (docs/how-to/pytest.md).

Every pytest of the environment imports `hooks.py`, so that imports torch and the bench only for a run.
"""
