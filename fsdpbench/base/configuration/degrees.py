"""How the ranks of a configuration are divided: a batch is of a data-parallel group of tp x cp ranks.

rank = ((replica x shards) + shard) x cp x tp      tp varies fastest: its ranks are neighbours in a node
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpbench.base.configuration.config import Config

PARALLEL = ("tp", "cp", "ep")
"""The settings that are degrees of parallelism beside FSDP."""


@dataclass(frozen=True)
class Degrees:
    """`tp`, `cp` and `ep` of `gpus` ranks."""

    gpus: int
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: Config) -> Degrees:
        """Return the degrees of `config`."""
        settings = config.settings
        return cls(config.gpus, settings.tp, settings.cp, settings.ep)

    @property
    def group(self) -> int:
        """Ranks that work on one batch."""
        return self.tp * self.cp

    @property
    def data(self) -> int:
        """Groups that each have a batch of their own."""
        return self.gpus // self.group

    @property
    def sharding(self) -> int:
        """Ranks that FSDP shards and reduces over: all but those of tensor parallelism."""
        return self.gpus // self.tp

    def data_rank(self, rank: int) -> int:
        """Which batch `rank` works on."""
        return rank // self.group
