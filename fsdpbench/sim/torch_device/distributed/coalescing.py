"""How a process group runs collectives: one by one, or several as one group of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Work

from fsdpbench.sim.torch_device.distributed.membership import Membership
from fsdpbench.sim.torch_device.strict import collectives as strict


class Coalescing(Membership):
    """Runs each call, or remembers it while several are being coalesced."""

    _coalesced: list[tuple[str, int, list[torch.Tensor], list[torch.Tensor]]] | None = None

    def run(
        self,
        kind: str,
        nbytes: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        members: int = 1,
    ) -> Work:
        """Run one collective, or ``members`` as one group; ``nbytes`` as `Network.collective_ns` counts them.

        Abstract, as is ``run_list``; pybind's metaclass leaves no room for ABCMeta beside it.
        """
        raise NotImplementedError

    def run_list(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        listed: list[torch.Tensor],
        opts: Any,
    ) -> Work:
        """Run a list form of a collective over ``listed``, the tensors that together are the full buffer."""
        raise NotImplementedError

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work | None:
        calls, self._coalesced = self._coalesced or [], None
        if not calls:
            return None
        ins = [tensor for call in calls for tensor in call[2]]
        outs = [tensor for call in calls for tensor in call[3]]
        return self.call(calls[0][0], sum(call[1] for call in calls), ins, outs, None, len(calls))

    def refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise what NCCL raises for tensors that it does not take."""
        strict.refuse_strided(tensors)

    def call(
        self,
        kind: str,
        nbytes: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        members: int = 1,
    ) -> Work:
        """Run one collective, or remember it while several are being coalesced."""
        self.refuse(inputs if inputs is outputs else (*inputs, *outputs))
        if self._coalesced is not None:
            self._coalesced.append((kind, nbytes, inputs, outputs))
            return _Queued()
        return self.run(kind, nbytes, inputs, outputs, opts, members)


class _Queued(Work):
    """A part of a coalesced collective: its time comes with the whole."""

    def wait(self, timeout: Any = None) -> bool:
        return True
