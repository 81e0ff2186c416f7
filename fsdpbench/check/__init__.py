"""The regression gate: a sweep's figures against a baseline that was committed earlier."""
