"""Factors on a packaged profile from a few measured runs of a user, each with an interval."""

from fsdpbench.lab.calibrate.from_results.fit import Factor, Fit, MeasuredRun, base_of, fit, runs_of_results
