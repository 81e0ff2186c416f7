"""Collectives that NCCL's process group refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.simulated


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, device="sim", dtype=dtype)


B = torch.bfloat16
# In a world of eight.
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "all-gather, size": (lambda: dist.all_gather_into_tensor(f(15), f(2)), ValueError, "world_size times"),
    "all-gather, dtype": (lambda: dist.all_gather_into_tensor(f(16), f(2, dtype=B)), TypeError, "same type"),
    "reduce-scatter, size": (lambda: dist.reduce_scatter_tensor(f(2), f(15)), ValueError, "times world size"),
    "reduce-scatter, dtype": (
        lambda: dist.reduce_scatter_tensor(f(2), f(16, dtype=B)),
        TypeError,
        "same type as the output",
    ),
    "splits, sum": (
        lambda: dist.all_to_all_single(f(16), f(16), [2] * 8, [1] * 8),
        RuntimeError,
        "doesn't match total dim 0 size",
    ),
    "splits, count": (lambda: dist.all_to_all_single(f(16), f(16), [16], [16]), RuntimeError, "not equal to"),
    "list too short": (lambda: dist.all_gather([f(2)] * 7, f(2)), ValueError, "7 tensors for 8 ranks"),
    "list to reduce": (lambda: dist.reduce_scatter(f(2), [f(2)] * 9), ValueError, "9 tensors for 8 ranks"),
    "lists to exchange": (lambda: dist.all_to_all([f(2)], [f(2)]), ValueError, "1 tensors for 8 ranks"),
    "gather": (lambda: dist.gather(f(2), [f(2)] * 2), ValueError, "Incorrect output list size 2"),
    "scatter": (lambda: dist.scatter(f(2), [f(3)] * 8), ValueError, "invalid tensor size at index 0"),
    "strided": (lambda: dist.all_reduce(f(4, 2).t()), ValueError, "Tensors must be contiguous"),
    "strided, source": (lambda: dist.all_gather_into_tensor(f(64), f(4, 2).t()), ValueError, "contiguous"),
    "root": (lambda: dist.broadcast(f(2), 8), dist.DistBackendError, "root 8 of a group of 8"),
    "root of a reduction": (lambda: dist.reduce(f(2), -1), dist.DistBackendError, "root -1"),
    "not a member": (
        lambda: dist.broadcast(f(2), 5, group=dist.new_group([0, 1])),
        ValueError,
        "Global rank 5 is not part of group",
    ),
}


def test_what_nccl_refuses_is_refused() -> None:
    from device_training import start

    start()
    warnings.simplefilter("ignore", FutureWarning)  # 2.13 renames two collectives
    for name, (run, kind, words) in REFUSED.items():
        with pytest.raises(kind) as caught:
            run()
        assert words in str(caught.value), name


def test_parts_of_coalesced_collectives_are_looked_at() -> None:
    from device_training import start

    start()
    from torch.distributed.distributed_c10d import _coalescing_manager

    def gather_both() -> None:
        with _coalescing_manager(async_ops=True):
            dist.all_gather_into_tensor(f(16), f(2))
            dist.all_gather_into_tensor(f(15), f(2))

    warnings.simplefilter("ignore", FutureWarning)
    with pytest.raises(ValueError, match="world_size times"):
        gather_both()


def test_channels_last_is_contiguous() -> None:
    from device_training import start

    start()
    dist.all_reduce(f(2, 3, 4, 4).to(memory_format=torch.channels_last))
    dist.all_reduce(torch.zeros(2))  # the host's go through gloo
    dist.all_reduce(torch.zeros(4, 2).t())
