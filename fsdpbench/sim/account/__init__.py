"""Who holds the simulated device's memory, asked when it runs out."""

from fsdpbench.sim.account.account import MemoryAccount
from fsdpbench.sim.account.places import Lines

__all__ = ["Lines", "MemoryAccount"]
