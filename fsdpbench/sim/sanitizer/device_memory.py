"""The shadow of the device's memory: blocks that are held, bytes that were given back."""

from __future__ import annotations

from collections.abc import Iterable

from fsdpbench.sim.allocator.follower import Region
from fsdpbench.sim.sanitizer.clocks import Clock, Clocks
from fsdpbench.sim.sanitizer.shadow import BlockShadow, FreedMemory


class DeviceMemory:
    """Follows the allocator's blocks. ``clocks`` say what is ordered when."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._blocks: dict[int, BlockShadow] = {}
        self._freed = FreedMemory()
        # Blocks that were freed while events are outstanding: their size, and what the events order.
        self._released: dict[int, tuple[int, Clock]] = {}

    def allocated(self, address: int, size: int) -> None:
        """A block is handed out: what was done with its bytes before has to be over before its first use."""
        self._blocks[address] = BlockShadow(
            address, address + size, self._freed.take(address, address + size)
        )

    def freed(self, address: int) -> None:
        """A block is given back; its bytes may be handed out again immediately."""
        shadow = self._blocks.pop(address, None)
        if shadow is not None and (shadow.cells or shadow.strided):
            self._freed.add(shadow.leave(self._clocks.host))

    def events_recorded(self, address: int, size: int, streams: Iterable[int]) -> None:
        """A freed block waits for events on other streams: they order its bytes, and nothing else."""
        order: Clock = []
        for stream in streams:
            for agent, epoch in enumerate(self._clocks.record(stream)):
                if agent >= len(order):
                    order.append(epoch)
                else:
                    order[agent] = max(order[agent], epoch)
        self._released[address] = (size, order)

    def events_passed(self, address: int) -> None:
        """The last of a freed block's events has passed."""
        size, order = self._released.pop(address, (0, []))
        self._freed.forget_ordered(address, address + size, order)

    def shadow_of(self, address: int, size: int) -> BlockShadow:
        """The history of a block that is held."""
        shadow = self._blocks.get(address)
        if shadow is None:
            shadow = self._blocks[address] = BlockShadow(address, address + size)
        return shadow


def at(address: int, region: Region) -> Region:
    """A region of a storage, as addresses."""
    return Region(address + region.start, address + region.end, region.runs)
