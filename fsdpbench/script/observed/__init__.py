"""What a script does that its figures do not show: which calls it makes, where its CPU waits, what its data
cost.

`calls.py` notes torch's calls with their lines, `waits.py` the lines at which the CPU waits for the device,
`loaders.py` the real time that a batch takes the host; `Observed` makes one record of them
(`script.observed` of the result), which `fsdpbench/advise` reads. Nothing is changed by looking.
"""

from __future__ import annotations

from fsdpbench.script.observed.observed import Observed

__all__ = ["Observed"]
