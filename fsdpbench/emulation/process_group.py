"""The backend "emulated" of torch.distributed: this process is rank 0 of many, and the others are a model.

A collective fills its outputs (`filling.py`) and holds its stream (`holding.py`) for as long as the network
of a hardware profile takes, the same model that the simulated device uses. Everything else is real.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from fsdpbench.emulation.filling import fill_outputs
from fsdpbench.emulation.holding import CpuHolder, GpuHolder, Holder
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.torch_device.distributed.collective_calls import (
    CollectiveCalls,
    collective_ranks,
    total_bytes,
)
from fsdpbench.sim.torch_device.distributed.process_group import MEMBER_NS

BACKEND = "emulated"


class EmulatedProcessGroup(CollectiveCalls):
    """One communicator; all of its members but this one are modelled."""

    backend_name = BACKEND

    def __init__(self, rank: int, size: int, ranks: Sequence[int], name: str, network: Network) -> None:
        super().__init__(rank, size, ranks, name)
        self._network = network
        self._holders: dict[str, Holder] = {}

    def run(
        self,
        kind: str,
        nbytes: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        members: int = 1,
    ) -> Work:
        """Fill the outputs, and take the modelled time."""
        tensors = [*outputs, *inputs]
        device = tensors[0].device.type if tensors else _default_device()
        fill = partial(fill_outputs, kind, inputs, outputs, self.rank(), self.size(), _operation(kind, opts))
        duration = self._network.collective_ns(kind, nbytes, self.ranks) + (members - 1) * MEMBER_NS
        asynchronous = opts is None or bool(getattr(opts, "asyncOp", True))
        return self._holder(device).run(kind, fill, duration, tensors, asynchronous)

    def run_list(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        listed: list[torch.Tensor],
        opts: Any,
    ) -> Work:
        """As the single form of as many bytes; the copies around it are real."""
        return self.call(kind, total_bytes(*listed), inputs, outputs, opts)

    def _holder(self, device: str) -> Holder:
        if device not in self._holders:
            self._holders[device] = GpuHolder() if device == "cuda" else CpuHolder()
        return self._holders[device]


def init_process_group(network: Network, rank: int, timeout: datetime.timedelta) -> None:
    """`dist.init_process_group` of the backend ``emulated`` for CPU and GPU tensors."""
    dist.Backend.register_backend(
        BACKEND, partial(_create, network), extended_api=True, devices=["cuda", "cpu"]
    )
    store = dist.HashStore()
    store.set_timeout(timeout)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=network.world_size)


def _create(network: Network, options: Any, backend_options: Any) -> EmulatedProcessGroup:
    ranks = collective_ranks(options)
    return EmulatedProcessGroup(options.group_rank, options.group_size, ranks, options.group_id, network)


def _operation(kind: str, opts: Any) -> Any:
    """The reduction; a sum with factors counts as an average, which is what it is used for."""
    if kind not in ("reduce_scatter", "all_reduce"):
        return None
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM) if opts is not None else dist.ReduceOp.SUM


def _default_device() -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"
