"""Foundations that every other package imports: errors, numbers, settings, configurations, records of
scripts, and safe file access."""
