"""The regression gate: compare the figures of a sweep with a committed baseline."""

LEAVE_OUT = "--leave-out"
"""The flag that names configurations to exclude from a baseline."""
