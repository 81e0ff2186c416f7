"""Observations of a script that its figures do not show, for advice. They change nothing.

`calls.py` notes torch's calls and the modules that are wrapped, `gradients.py` the parameters that do not
train, by the ranks that `exchange.py` finds for each reduction, `waits.py` the lines at which the CPU waits
and the time of its loaders; `observed.py` makes one record of all (`script.observed` of the result).
"""

from fsdpbench.script.observed.observed import Observed

__all__ = ["Observed"]
