"""Residuals of predictions of published runs, and the intervals that follow from them."""
