"""What the simulated device tells those who follow its memory: all uses (the sanitizer), or who holds it."""

from __future__ import annotations

from collections.abc import Sequence
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
    """One tensor of a call: its place among the call's tensors, what of it is touched, whether written."""

    place: int
    region: Region
    writes: bool


class MemoryFollower(Protocol):
    """Is notified of all work before it is launched, and of all that the CPU waits for."""

    def uses_of(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Use, ...]:
        """What a call reads and writes, found out once for each plan."""

    def kernel(
        self, stream: int, name: str, uses: Sequence[Use], tensors: list[Any], outputs: list[torch.Tensor]
    ) -> None:
        """An operator is about to be launched: its arguments, and new tensors that it returns."""

    def workspaces(self, stream: int, blocks: Sequence[Any]) -> None:
        """The newest kernel writes memory of its own."""

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
        """A collective is about to be queued; ``awaited``: its caller has to wait for its work."""

    def host_copy(
        self,
        stream: int,
        kind: str,
        device: torch.Tensor | None,
        host: torch.Tensor | None,
        *,
        blocking: bool,
    ) -> None:
        """A copy over the host link is about to be queued; tensors that do not exist as such are None.
        ``blocking``: the CPU waits for it."""

    def host_reads(self, tensor: torch.Tensor, name: str) -> None:
        """Python reads a tensor of the host past torch's operators (`numpy`, `tolist`, saving)."""

    def host_waits_for_all(self) -> None:
        """The CPU waits for the device."""

    def stream_made(self, stream: int, what: str = "") -> None:
        """A stream was made: by the program, or for ``what``."""

    def collective_passed(self, tensors: Sequence[torch.Tensor], marker: Any) -> None:
        """The process group has seen that a collective is done, and lets its tensors go."""

    def enter(self, scope: str) -> None:
        """A span of the profiler begins."""

    def leave(self, scope: str) -> None:
        """A span of the profiler ends."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""

    def end(self) -> None:
        """The simulation is over."""


class Lateness(Protocol):
    """Says how late the last rank of a collective comes (`jitter`)."""

    def lateness_ns(self, group_size: int) -> int:
        """Return how long a collective of ``group_size`` ranks waits for the last of them."""


class HolderFollower(Protocol):
    """Is notified of spans and collectives, to say who holds memory (`account/`)."""

    def enter(self, span: str) -> None:
        """A span of the profiler begins."""

    def leave(self, span: str) -> None:
        """A span of the profiler ends."""

    def collective(self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """A collective is about to be queued."""

    def end(self) -> None:
        """The simulation is over."""
