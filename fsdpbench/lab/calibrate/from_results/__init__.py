"""Factors on a packaged profile from a few measured runs of one's own, each with an error bar."""

from fsdpbench.lab.calibrate.from_results.fit import Factor, Fit, MeasuredRun, base_of, fit, runs_of_results
