"""What one line of a script would change, made without a change of its text: torch's own calls are
interposed.

    variation=checkpoint ──> every fully_shard(block, ...) of the script also wraps block.forward

`varied.py` applies one; each family of variations has a file of its own.
"""

from __future__ import annotations

from fsdpbench.script.variations.sharding import NoEffectError, Variation
from fsdpbench.script.variations.varied import Varied

__all__ = ["NoEffectError", "Variation", "Varied"]
