"""Interfaces of observers of device memory: of all uses (the sanitizer), or of what holds memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Runs(NamedTuple):
    """``(count, step)`` of each dimension, outermost first, over contiguous runs of ``width`` bytes."""

    dimensions: tuple[tuple[int, int], ...]
    width: int


class Region(NamedTuple):
    """Bytes from ``start`` to ``end`` of a storage; with holes if ``runs`` is set."""

    start: int
    end: int
    runs: Runs | None = None


class Use(NamedTuple):
    """A use of one tensor of a call: its index among the call's tensors, the bytes, whether written."""

    place: int
    region: Region
    writes: bool


class MemoryFollower(Protocol):
    """Observer of all work before its launch, and of everything for which the CPU waits (the sanitizer)."""

    def uses_of(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Use, ...]: ...
    def kernel(
        self, stream: int, name: str, uses: Sequence[Use], tensors: list[Any], outputs: list[torch.Tensor]
    ) -> None:
        """Observe an operator that is about to be launched; `outputs`: new tensors."""

    def workspaces(self, stream: int, blocks: Sequence[Any]) -> None: ...
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
        """Observe a collective about to be queued; `awaited`: its caller must wait for its work."""

    def host_copy(
        self,
        stream: int,
        kind: str,
        device: torch.Tensor | None,
        host: torch.Tensor | None,
        *,
        blocking: bool,
    ) -> None:
        """Observe a host-link copy about to be queued; `blocking`: the CPU waits for it."""

    def host_reads(self, tensor: torch.Tensor, name: str) -> None: ...
    def host_waits_for_all(self) -> None: ...
    def stream_made(self, stream: int, what: str = "") -> None: ...
    def collective_passed(self, tensors: Sequence[torch.Tensor], marker: Any) -> None: ...
    def enter(self, scope: str) -> None: ...
    def leave(self, scope: str) -> None: ...
    def step_ended(self, optimizer: torch.optim.Optimizer) -> None: ...
    def end(self) -> None: ...


class Lateness(Protocol):
    """Source of the delay by the last rank of a collective (`jitter`)."""

    def lateness_ns(self, group_size: int) -> int: ...


class HolderFollower(Protocol):
    """Observer of spans and collectives that attributes memory to holders (`sim/followers/account.py`)."""

    def enter(self, span: str) -> None: ...
    def leave(self, span: str) -> None: ...
    def collective(
        self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None: ...
    def end(self) -> None: ...
