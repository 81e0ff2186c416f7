"""Interfaces of observers of the simulated device's memory: all uses (the sanitizer), or its holders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Runs(NamedTuple):
    """``(count, step)`` of each dimension, outermost first, over contiguous runs of ``width`` bytes."""

    dimensions: tuple[tuple[int, int], ...]
    width: int


class Region(NamedTuple):
    """Bytes from ``start`` to ``end`` of a storage; with holes where there are ``runs``."""

    start: int
    end: int
    runs: Runs | None = None


class Use(NamedTuple):
    """One tensor of a call: its position among the call's tensors, the bytes used, whether written."""

    place: int
    region: Region
    writes: bool


class MemoryFollower(Protocol):
    """Observer of all work before its launch, and of everything the CPU waits for."""

    def uses_of(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Use, ...]:
        """Return the reads and writes of a call, computed once for each plan."""

    def kernel(
        self, stream: int, name: str, uses: Sequence[Use], tensors: list[Any], outputs: list[torch.Tensor]
    ) -> None:
        """Observe an operator about to be launched: its arguments, and new tensors that it returns."""

    def workspaces(self, stream: int, blocks: Sequence[Any]) -> None:
        """Observe the newest kernel writing its own memory."""

    def collective(
        self,
        stream: int,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        awaited: bool,
        group: str,
    ) -> None:
        """Observe a collective about to be queued; `awaited`: its caller has to wait for its work."""

    def host_copy(
        self,
        stream: int,
        kind: str,
        device: torch.Tensor | None,
        host: torch.Tensor | None,
        *,
        blocking: bool,
    ) -> None:
        """Observe a copy over the host link about to be queued; `blocking`: the CPU waits for it.

        Tensors that do not exist as such are None.
        """

    def host_reads(self, tensor: torch.Tensor, name: str) -> None:
        """Observe a read of a tensor of the host without torch's operators (`numpy`, `tolist`, saving)."""

    def host_waits_for_all(self) -> None:
        """Observe the CPU waiting for the device."""

    def stream_made(self, stream: int, what: str = "") -> None:
        """Observe a new stream: of the program, or for `what`."""

    def collective_passed(self, tensors: Sequence[torch.Tensor], marker: Any) -> None:
        """Observe the process group finding a collective done and releasing its tensors."""

    def enter(self, scope: str) -> None:
        """Observe the start of a profiler span."""

    def leave(self, scope: str) -> None:
        """Observe the end of a profiler span."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the end of an optimizer's step."""

    def end(self) -> None:
        """Observe the end of the simulation."""


class Lateness(Protocol):
    """Source of the last rank's lateness in a collective (`jitter`)."""

    def lateness_ns(self, group_size: int) -> int:
        """Return how long a collective of `group_size` ranks waits for the last of them, in ns."""


class HolderFollower(Protocol):
    """Observer of spans and collectives that attributes memory to its holders (`followers/account.py`)."""

    def enter(self, span: str) -> None:
        """Observe the start of a profiler span."""

    def leave(self, span: str) -> None:
        """Observe the end of a profiler span."""

    def collective(self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Observe a collective about to be queued."""

    def end(self) -> None:
        """Observe the end of the simulation."""
