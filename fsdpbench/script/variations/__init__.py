"""Variations of a script: one line changed without a change of its text, by functions around torch's calls.

    variation=checkpoint ──> every fully_shard(block, ...) of the script also wraps block.forward

`sharding.py` names the variations and has those of units, `programs.py` those of optimizers, recomputing and
the host; `varied.py` puts the variations of a configuration in place.
"""

from fsdpbench.script.variations.sharding import NoEffectError, Variation
from fsdpbench.script.variations.varied import Varied

__all__ = ["NoEffectError", "Variation", "Varied"]
