"""The systems under test, by name."""

from __future__ import annotations

from fsdpbench.systems.base import BuildContext, System
from fsdpbench.systems.registry import Offer, get_system, offers
from fsdpbench.systems.unsharded import NO_SHARDING

__all__ = ["NO_SHARDING", "BuildContext", "Offer", "System", "get_system", "offers"]
