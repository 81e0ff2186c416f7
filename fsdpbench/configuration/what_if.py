"""What `fsdpbench explain` asks of simulated GPUs beside a configuration's own settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fsdpbench.errors import UsageError


@dataclass(frozen=True)
class WhatIf:
    """account: keep account of who holds memory. room: times the memory that the GPU has. allocator:
    settings as
    `PYTORCH_CUDA_ALLOC_CONF` writes them, instead of what the environment says.

    variation: what is done to a script's own calls (`script/variations`); several between `+`.
    """

    account: bool = False
    room: float = 1.0
    allocator: str | None = None
    variation: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.room < math.inf:
            raise UsageError(f"room must be a finite number above 0, not {self.room}")

    def after(self, earlier: WhatIf) -> WhatIf:
        """This one where `earlier` was asked for already."""
        names = [each for each in (self.variation, earlier.variation) if each]
        return replace(
            earlier,
            allocator=self.allocator or earlier.allocator,
            variation="+".join(names) or None,
        )
