"""The backend "emulated" of torch.distributed: this process is rank 0 of many, and the others are a model.

A collective fills its outputs (`fill_outputs`) and holds its stream (`holding.py`) for as long as the network
of a hardware profile takes, the same model that the simulated device uses. Everything else is real.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work

from fsdpbench.engine.emulation.holding import CpuHolder, GpuHolder
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
        self._holders: dict[str, GpuHolder | CpuHolder] = {}

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
        """Run the single form of as many bytes as `listed` has; the copies around it are real."""
        return self.call(kind, total_bytes(*listed), inputs, outputs, opts)

    def _holder(self, device: str) -> GpuHolder | CpuHolder:
        if device not in self._holders:
            self._holders[device] = GpuHolder() if device == "cuda" else CpuHolder()
        return self._holders[device]


def init_process_group(network: Network, rank: int, timeout: datetime.timedelta) -> None:
    """Call `dist.init_process_group` with the backend `emulated`, for CPU and GPU tensors."""
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
    """Return the reduction; a sum with factors counts as an average, which it is used for."""
    if kind not in ("reduce_scatter", "all_reduce"):
        return None
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM) if opts is not None else dist.ReduceOp.SUM


def _default_device() -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"


Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def fill_outputs(kind: str, inputs: Tensors, outputs: Tensors, rank: int, size: int, operation: Any) -> None:
    """Write the results that a collective of `size` ranks would leave on `rank`.

    Every rank is assumed to have the same shards and the same gradients: gathers repeat the own part,
    averages leave it, sums multiply it. Losses stay finite that way, and the writes cost the memory traffic
    that they cost under NCCL.

    ``inputs`` and ``outputs`` are as `CollectiveCalls.run` gets them: pairs, or one tensor and a list.
    ``operation`` is the `ReduceOp`, None where there is none.
    """
    if kind == "all_gather":
        _gather(inputs, outputs, rank, size)
    elif kind == "reduce_scatter":
        for output, own in zip(outputs, _own_parts(inputs, outputs, rank, size), strict=True):
            _reduce(output, own, size, operation)
    elif kind == "all_reduce":
        for tensor in outputs:
            _reduce(tensor, tensor, size, operation)
    elif kind == "all_to_all":
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() == source.numel():
                output.copy_(source.view_as(output))
            else:
                output.zero_()


def _gather(inputs: Tensors, outputs: Tensors, rank: int, size: int) -> None:
    if len(outputs) > len(inputs):  # a list of one tensor a rank, for each input
        for index, source in enumerate(inputs):
            for output in outputs[index * size : (index + 1) * size]:
                _copy(output, source)
        return
    for output, source in zip(outputs, inputs, strict=True):
        slots, own = output.view(size, -1), source.reshape(1, -1)
        # The own shard may be in its slot already, and a copy onto itself is refused.
        if rank:
            slots[:rank].copy_(own.expand(rank, -1))
        if rank + 1 < size:
            slots[rank + 1 :].copy_(own.expand(size - rank - 1, -1))
        if slots[rank].data_ptr() != source.data_ptr():
            slots[rank].copy_(own[0])


def _own_parts(inputs: Tensors, outputs: Tensors, rank: int, size: int) -> list[torch.Tensor]:
    if len(inputs) > len(outputs):
        return [inputs[index * size + rank] for index in range(len(outputs))]
    return [
        source if source.numel() == output.numel() else source.view(size, -1)[rank]
        for source, output in zip(inputs, outputs, strict=True)
    ]


def _reduce(output: torch.Tensor, own: torch.Tensor, size: int, operation: Any) -> None:
    if output.data_ptr() != own.data_ptr():
        _copy(output, own)
    if operation == ReduceOp.SUM:
        output.mul_(size)
    elif operation == ReduceOp.PRODUCT:
        output.pow_(size)


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy as much of a tensor as fits: list forms may be uneven."""
    count = min(output.numel(), source.numel())
    output.view(-1)[:count].copy_(source.reshape(-1)[:count])
