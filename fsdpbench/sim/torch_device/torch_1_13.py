"""What torch 1.13 did otherwise, laid over the installed one; read from the source of torch 1.13.1
(`distributed/fsdp/fully_sharded_data_parallel.py` where no other file is named).

* `_post_backward_hook` padded each unit's gradient also where there was nothing to pad, so that the
  reduce-scatter read a copy of the gradient, made on the post-backward stream, and its output was zeroed.

      gradient ──copy──> input of the reduce-scatter ──(communicator's stream)──> shard
      held until the reduction is done                 held until the reduction is done

* `_pre_backward_hook` called `_unshard` also for a unit that was prefetched, and `_unshard` asked the rate
  limiter first. The last unit of backward, which prefetches none, waited there too. Today it does not: the
  CPU runs a unit further ahead, whose gradient, copy and parameters are taken on top.
* `FlattenParamsWrapper.forward` made the views of the flat parameter on the stream of computation
  (`distributed/fsdp/flatten_params_wrapper.py`). Autograd runs a node on the stream of its forward: today's
  views are made on the stream of gathers, where their backward then copies gradients together, behind
  prefetched gathers.
* Activation checkpointing was reentrant by default (`utils/checkpoint.py`; `CheckpointImpl.REENTRANT` in
  `distributed/algorithms/_checkpoint/checkpoint_wrapper.py`), and recomputed a block to its end.
* There was no RMSNorm in torch: models composed it (`workloads/layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fsdpbench.sim.model.timeline import DEFAULT_STREAM
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.torch_internals import patched, replaced


def copied_gradients() -> AbstractContextManager[None]:
    """FSDP1's reduce-scatter reads a copy of the gradient."""
    return patched("reduce_scatter_tensors", lambda original: padded_copy)


def limited_prefetched_units() -> AbstractContextManager[None]:
    """FSDP1's rate limiter is asked for prefetched units too."""
    return patched("prefetch_handle", lambda original: partial(limit_then_prefetch, original))


def views_on_compute_stream() -> AbstractContextManager[None]:
    """FSDP1's views of the flat parameter are made on the stream of computation."""
    return patched("use_unsharded_views", lambda original: on_compute_stream(original))


def on_compute_stream(make_views: Callable[..., None]) -> Callable[..., None]:
    """``make_views`` with the default stream current, which takes the CPU no time: there was no switch."""

    @wraps(make_views)
    def make(*args: Any, **kwargs: Any) -> None:
        with ACCELERATOR.backward.made_on(DEFAULT_STREAM):
            make_views(*args, **kwargs)

    return make


def reentrant_checkpoints() -> AbstractContextManager[None]:
    """Blocks of the bench's models are checkpointed in the reentrant form."""
    from fsdpbench.workloads import checkpointing

    return replaced(checkpointing, checkpoint=reentrant)


def composed_rms_norm() -> AbstractContextManager[None]:
    """`F.rms_norm`, and with it `nn.RMSNorm`, runs operators."""
    from fsdpbench.workloads import layers

    return replaced(torch.nn.functional, rms_norm=layers.composed_rms_norm)


def padded_copy(state: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a unit's reduce-scatter: always a padded copy, and a zeroed shard."""
    ranks: int = state.world_size  # type: ignore[attr-defined]
    shard = -(-gradient.numel() // ranks)
    missing = ranks * shard - gradient.numel()
    padded = torch.nn.functional.pad(gradient, [0, missing]) if missing else gradient.clone()
    return padded, gradient.new_zeros(shard)


def limit_then_prefetch(prefetch: Callable[..., None], state: Any, handle: Any, mode: Any) -> None:
    """Before a unit's backward, ask the limiter for the unit itself too, although it was prefetched."""
    before_backward = handle is not None and handle._training_state.name == "BACKWARD_PRE"
    if before_backward and handle._prefetched and state.limit_all_gathers:
        freed = state._free_event_queue.dequeue_if_needed()
        if freed is not None:
            freed.synchronize()
    prefetch(state, handle, mode)


def reentrant(function: Any, *args: Any, **options: Any) -> Any:
    """torch's `checkpoint` in the form that was its default."""
    return checkpoint(
        function, *args, use_reentrant=True, preserve_rng_state=options.get("preserve_rng_state", True)
    )
