"""Observations of a script for advice, beyond its figures. They change nothing.

`calls.py` records torch's calls and the wrapped modules, `gradients.py` the parameters that do not train,
from the ranks that `exchange.py` finds for each reduction, `waits.py` the lines at which the CPU waits and
the time of data loaders; `observed.py` makes one record of all of them (`script.observed` of the result).
"""

from fsdpbench.script.observed.observed import Observed

__all__ = ["Observed"]
