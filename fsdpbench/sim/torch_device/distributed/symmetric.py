"""Symmetric memory (`torch.distributed._symmetric_memory`) on the simulated device, as far as FSDP2 uses it.

Ranks of a group meet for a tensor (`rendezvous`); NCCL then gathers into it by copy engines if it may use no
multiprocessors (NCCL_CTA_POLICY=2) and all ranks are in one NVLink domain, here a node. Such a gather takes
as long as the ordinary one, and neither slows computation nor is slowed by it (`nvlink.copy_engine_gathers`
of a profile, estimated). NCCL's kernels for symmetric memory, used otherwise, take as long as ordinary ones.

The memory is the caching allocator's: its own pool and the rendezvous cost nothing here.
"""

import functools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fsdpbench.base.torch_internals import expect, replace, symmetric_memory
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.strict.words import error_text
from fsdpbench.sim.torch_device.tensors import is_on_device, is_simulated, record_of

_POLICY = "NCCL_CTA_POLICY"
_ZERO = "2"


POOL = object()
"""The pool of symmetric memory."""


class _Meeting:
    """Result of a rendezvous; its use beside collectives is unknown."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(error_text("symmetric.other_use", name))


def use_pool(pool: Any) -> AbstractContextManager[None]:
    """Enter `use_mem_pool` of the pool of symmetric memory; raises `NotImplementedError` for another one."""
    if pool is not POOL:
        raise NotImplementedError(error_text("symmetric.mem_pool"))
    return nullcontext()


def gathers_by_copy_engines(
    kind: str, outputs: Sequence[torch.Tensor], ranks: Sequence[int], network: Network
) -> bool:
    """Return whether copy engines do a collective of `ranks` into `outputs`."""
    if kind != "all_gather" or os.environ.get(_POLICY) != _ZERO:
        return False
    records = [record_of(tensor.untyped_storage()) for tensor in outputs]
    registered = all(record is not None and record.symmetric for record in records)
    return registered and network.nodes_of(ranks) == 1


def why_unavailable(network: Network) -> str | None:
    """Return why GPUs cannot gather by copy engines; None if they can."""
    if network.profile.nvlink.copy_engine_gathers:
        return None
    return (
        f"the hardware profile {network.profile.name} has no all-gathers by copy engines "
        "(nvlink.copy_engine_gathers): no source has figures for these GPUs"
    )


def patch_symmetric_memory(accelerator: Accelerator) -> None:
    """Make memory of the simulated device symmetric; other devices keep torch's."""
    backend = expect(symmetric_memory, "set_backend")
    pool = expect(symmetric_memory, "get_mem_pool")
    meet = expect(symmetric_memory, "rendezvous")
    use = expect(torch.cuda, "use_mem_pool")
    allocate = expect(symmetric_memory, "empty")

    def set_backend(name: str) -> None:
        if not accelerator.started:
            backend(name)
        elif name != "NCCL":
            raise NotImplementedError(f"symmetric memory of {name} is not simulated: NCCL's is")

    def get_mem_pool(device: Any) -> Any:
        return POOL if accelerator.started else pool(device)

    def rendezvous(tensor: torch.Tensor, group: Any) -> Any:
        if not is_on_device(tensor):
            return meet(tensor, group)
        reason = why_unavailable(accelerator.network)
        if reason is not None:
            raise RuntimeError(f"symmetric memory: {reason}")
        record = record_of(tensor.untyped_storage())
        assert record is not None
        record.symmetric = True
        return _Meeting()

    @functools.wraps(use)  # Dynamo looks below the wrapper
    def use_mem_pool(pool: Any, *args: Any, **kwargs: Any) -> Any:
        return use_pool(pool) if pool is POOL else use(pool, *args, **kwargs)

    def empty(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        place = torch.device(device or "cpu")
        return (torch.empty if is_simulated(place) else allocate)(*size, device=place, **kwargs)

    replaced = [empty, set_backend, get_mem_pool, rendezvous]
    replace(symmetric_memory, **{each.__name__: each for each in replaced})
    replace(torch.cuda, use_mem_pool=use_mem_pool)
