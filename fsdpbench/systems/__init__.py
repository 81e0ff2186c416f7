"""The systems under test, by name."""

from fsdpbench.systems.base import BuildContext, System
from fsdpbench.systems.narrow import chosen_software, software_of
from fsdpbench.systems.registry import get_system, offers, private_names
from fsdpbench.systems.unsharded import NO_SHARDING
