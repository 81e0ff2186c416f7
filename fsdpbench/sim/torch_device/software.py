"""Mechanisms: behaviour of other software versions that replaces the installed one's.

Each is a context manager and belongs to one key of a software profile. `install` enters those that the
profile enables; closing its result undoes them. Callers provide those that change models. Behaviour of torch
1.13 follows the source of 1.13.1.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from typing import Any

import torch

from fsdpbench.base.torch_internals import patched
from fsdpbench.sim.model.software import SoftwareProfile
from fsdpbench.sim.model.timeline import DEFAULT_STREAM
from fsdpbench.sim.torch_device.accelerator import Accelerator


def copied_gradients() -> AbstractContextManager[None]:
    """Make FSDP1's reduce-scatter read a copy of the gradient (`_post_backward_hook` of torch 1.13).

    It padded each unit's gradient even without need: a copy on the post-backward stream, zeroed first.
        gradient ──copy──> input of the reduce-scatter ──(communicator's stream)──> shard
        held until the reduction is done                 held until the reduction is done
    """
    return patched("reduce_scatter_tensors", lambda original: padded_copy)


def limited_prefetched_units() -> AbstractContextManager[None]:
    """Make FSDP1's rate limiter also count prefetched units (`_pre_backward_hook` of torch 1.13).

    The last unit of backward, which prefetches nothing, waited there too. Today it does not, so the CPU runs
    one unit further ahead, whose gradient, copy and parameters are allocated in addition.
    """
    return patched("prefetch_handle", lambda original: partial(limit_then_prefetch, original))


def views_on_compute_stream(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Create FSDP1's views of the flat parameter on the compute stream (`FlattenParamsWrapper`, torch 1.13).

    Autograd runs a node on the stream of its forward. Today the views are created on the all-gather stream,
    so their backward, which copies gradients together, runs there after prefetched all-gathers.
    """
    return patched("use_unsharded_views", lambda original: on_compute_stream(original, accelerator))


def on_compute_stream(make_views: Callable[..., None], accelerator: Accelerator) -> Callable[..., None]:
    """Return `make_views` with the default stream current, without CPU time for the switch."""

    @wraps(make_views)
    def make(*args: Any, **kwargs: Any) -> None:
        with accelerator.backward.made_on(DEFAULT_STREAM):
            make_views(*args, **kwargs)

    return make


def padded_copy(state: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and output of a unit's reduce-scatter: always a padded copy, and a zeroed shard."""
    ranks: int = state.world_size  # type: ignore[attr-defined]
    shard = -(-gradient.numel() // ranks)
    missing = ranks * shard - gradient.numel()
    padded = torch.nn.functional.pad(gradient, [0, missing]) if missing else gradient.clone()
    return padded, gradient.new_zeros(shard)


def limit_then_prefetch(prefetch: Callable[..., None], state: Any, handle: Any, mode: Any) -> None:
    """Wait for the limiter before the backward of the unit with `handle`, even if it was prefetched."""
    before_backward = handle is not None and handle._training_state.name == "BACKWARD_PRE"
    if before_backward and handle._prefetched and state.limit_all_gathers:
        freed = state._free_event_queue.dequeue_if_needed()
        if freed is not None:
            freed.synchronize()
    prefetch(state, handle, mode)


Mechanism = Callable[[], AbstractContextManager[None]]

MECHANISMS: dict[str, Mechanism] = {
    "fsdp1.copies_gradients": copied_gradients,
    "fsdp1.limits_prefetched_units": limited_prefetched_units,
}
"""Mechanisms by key of a software profile; the code concerned reads other keys itself."""


def install(
    software: SoftwareProfile, accelerator: Accelerator, of_models: Mapping[str, Mechanism]
) -> ExitStack:
    """Enter the mechanisms that `software` enables, including `of_models`. Closing the stack undoes them.

    Raises `TorchInternalError` if the installed torch lacks a replaced name, after undoing all replacements.
    """
    views = partial(views_on_compute_stream, accelerator)
    mechanisms: dict[str, Mechanism] = {**MECHANISMS, **of_models, "fsdp1.views_on_compute_stream": views}
    with ExitStack() as entered:
        for key in software.changes:
            if key in mechanisms:
                entered.enter_context(mechanisms[key]())
        return entered.pop_all()
