"""PyTorch's FSDP1 as torch 1.13 had it, for published runs that were made with it (simulated only).

What training does is today's torch; this lays over it what differs in memory and time, read from the source
of torch 1.13.1 (`distributed/fsdp/fully_sharded_data_parallel.py` where no other file is named):

* Collectives ran on the communicator's own stream and kept their tensors by `record_stream` (so before 2.8):
  a buffer that Python has let go of stays taken until the collective is done.
* `_post_backward_hook` padded each unit's gradient also where there was nothing to pad, so that the
  reduce-scatter read a copy of the gradient, made on the post-backward stream, and its output was zeroed.

      gradient ──copy──> input of the reduce-scatter ──(communicator's stream)──> shard
      held until the reduction is done                 held until the reduction is done

* `_pre_backward_hook` called `_unshard` also for a unit that was prefetched, and `_unshard` asked the rate
  limiter first. The last unit of backward, which prefetches none, waited there too. Today it does not: the
  CPU runs a unit further ahead, whose gradient, copy and parameters are taken on top.
* Modules had views of one flat parameter; `use_orig_params` came with 2.0.
* Activation checkpointing was reentrant by default (`utils/checkpoint.py`; `CheckpointImpl.REENTRANT` in
  `distributed/algorithms/_checkpoint/checkpoint_wrapper.py`), and recomputed a block to its end.
* Fused attention was that of Triton and of flash attention 1, slower backward than today's.
* There was no RMSNorm in torch: models composed it (here as Hugging Face's `T5LayerNorm`, `modeling_t5.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdpbench.configuration.config import Config
from fsdpbench.systems.base import BuildContext
from fsdpbench.systems.fsdp1 import TorchFsdp1
from fsdpbench.torch_internals import patch, replace
from fsdpbench.workloads import checkpointing


class TorchFsdp1Of2022(TorchFsdp1):
    """Today's FSDP1 of torch, patched to do what torch 1.13's did."""

    name = "torch-fsdp1-1.13"
    summary = "PyTorch's FSDP1 as torch 1.13 had it: collectives, gradient copy, rate limiter, checkpointing"
    devices = frozenset({"sim"})
    recomputes_in_full = True
    attention_backward: ClassVar[float] = 0.667
    """Fused attention's rate backward over today's; fitted to llm-foundry's runs on A100."""

    def refuses(self, config: Config) -> dict[str, str]:
        refused = super().refuses(config)
        if str(config.settings.activation_checkpointing).startswith("op"):
            refused["activation_checkpointing"] = "checkpointing by operator came with torch 2.4"
        return refused

    def wrap(self, context: BuildContext) -> nn.Module:
        from fsdpbench.sim.accelerator import ACCELERATOR

        ACCELERATOR.collectives_on_own_streams = True
        patch("reduce_scatter_tensors", lambda original: _padded_copy)
        patch(
            "prefetch_handle",
            lambda original: (
                original if isinstance(original, partial) else partial(_limit_then_prefetch, original)
            ),
        )
        slow_attention_backward(self.attention_backward)
        checkpointing.checkpoint = _reentrant
        replace(nn.RMSNorm, forward=_composed_norm)
        return super().wrap(context)

    def _extras(self, config: Config) -> dict[str, Any]:
        return {**super()._extras(config), "use_orig_params": False}


def slow_attention_backward(share: float) -> None:
    """Fused attention's backward at `share` of the rate that the hardware's profile gives for today's."""
    from fsdpbench.sim.accelerator import ACCELERATOR
    from fsdpbench.sim.costs import KernelCosts

    profile = ACCELERATOR.kernel_costs.profile
    attention = dataclasses.replace(
        profile.attention, backward_tflops=profile.attention.backward_tflops * share
    )
    ACCELERATOR.kernel_costs = KernelCosts(dataclasses.replace(profile, attention=attention))


def _padded_copy(state: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a unit's reduce-scatter: always a padded copy, and a zeroed shard."""
    ranks: int = state.world_size  # type: ignore[attr-defined]
    shard = -(-gradient.numel() // ranks)
    missing = ranks * shard - gradient.numel()
    padded = torch.nn.functional.pad(gradient, [0, missing]) if missing else gradient.clone()
    return padded, gradient.new_zeros(shard)


def _limit_then_prefetch(prefetch: Callable[..., None], state: Any, handle: Any, mode: Any) -> None:
    """Before a unit's backward, ask the limiter for the unit itself too, although it was prefetched."""
    before_backward = handle is not None and handle._training_state.name == "BACKWARD_PRE"
    if before_backward and handle._prefetched and state.limit_all_gathers:
        freed = state._free_event_queue.dequeue_if_needed()
        if freed is not None:
            freed.synchronize()
    prefetch(state, handle, mode)


def _reentrant(function: Any, *args: Any, **options: Any) -> Any:
    """torch's `checkpoint` in the form that was its default."""
    return checkpoint(
        function, *args, use_reentrant=True, preserve_rng_state=options.get("preserve_rng_state", True)
    )


def _composed_norm(norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm in operators: the mean square in fp32, the rest as type promotion has it."""
    mean_square = x.float().pow(2).mean(-1, keepdim=True)
    normed = (x * torch.rsqrt(mean_square + (norm.eps or torch.finfo(x.dtype).eps))).to(norm.weight.dtype)
    return norm.weight * normed
