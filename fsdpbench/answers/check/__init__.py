"""The regression gate: a sweep's figures against a baseline that was committed earlier."""

LEAVE_OUT = "--leave-out"
"""The flag for configurations that a baseline does without."""
