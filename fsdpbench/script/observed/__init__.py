"""Observations of a script for advice, beyond its figures. They change nothing.

They become one record, `script.observed` of the result.
"""

from fsdpbench.script.observed.observed import Observed

__all__ = ["Observed"]
