"""What one line of a script would change, made without a change of its text: torch's own calls are
interposed.

    variation=checkpoint ──> every fully_shard(block, ...) of the script also wraps block.forward

`kinds.py` names the variations, `varied.py` puts one in place; each family has a file of its
own: `sharding.py`, `units.py`, `recomputing.py`, `batches.py`, `host.py`, `programs.py`.
"""

from __future__ import annotations

from fsdpbench.script.variations.sharding import NoEffectError, Variation
from fsdpbench.script.variations.varied import Varied

__all__ = ["NoEffectError", "Variation", "Varied"]
