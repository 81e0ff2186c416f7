"""Variations of a script: one line's effect is changed, not its text, by functions around torch's calls.

variation=checkpoint ──> every fully_shard(block, ...) of the script also wraps block.forward
"""

from fsdpbench.script.variations.sharding import NoEffectError
from fsdpbench.script.variations.varied import Varied

__all__ = ["NoEffectError", "Varied"]
