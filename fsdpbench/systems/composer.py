"""llm-foundry's GPT under Composer's trainer and PyTorch's FSDP1, for published runs (simulated only).

What both do beside FSDP costs time and memory that the bench's own training loop does not have. Read from the
sources of llm-foundry 0.1.0 and 0.4.0 and of Composer (`mosaicml`) 0.14.1 and 0.17.0:

* `trainer.py` (`_train_microbatch`) keeps the outputs, logits included, as `state.outputs` until the next
  microbatch's forward has returned.
* After each backward it updates two metrics of the training batch, cross entropy and perplexity
  (`_eval_train_metrics`; `LanguageCrossEntropy.update` in `metrics/nlp.py`). Each takes the cross entropy of
  the logits: log-probabilities in their dtype, then autocast's copy of those in fp32 for `nll_loss`.
* The loss is flash-attn's fused one (`loss_fn: fused_crossentropy`): one pass over the logits forward and one
  backward, no log-probabilities in memory.

      forward, loss ── backward ── metric ── metric ── forward, loss ── ...
             └ logits of this microbatch ...................^ released

* `attn_impl: flash` packs queries, keys and values by the padding mask before the kernel and unpacks its
  output (`flash_attn_fn` in `layers/attention.py`, `bert_padding.py` of flash-attn), also where nothing is
  padded. Finding the places (`nonzero`) and the longest sequence (`.item()`) makes the CPU wait, six times
  a layer. `attn_impl: triton`, the default of 0.1.0, does without.
* Both attentions were slower backward than today's (`slow_attention_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.configuration.config import Config
from fsdpbench.systems.base import BuildContext
from fsdpbench.systems.fsdp1 import TorchFsdp1
from fsdpbench.systems.fsdp1_of_2022 import TorchFsdp1Of2022, slow_attention_backward
from fsdpbench.workloads import gpt

_METRICS = ("cross entropy", "perplexity")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _UnderComposer(TorchFsdp1):
    """What both versions share."""

    devices = frozenset({"sim"})

    def refuses(self, config: Config) -> dict[str, str]:
        refused = super().refuses(config)
        if not config.model.startswith(gpt.FAMILY):
            refused["model"] = f"llm-foundry's runs are of GPTs, not of {config.model}"
        return refused

    def wrap(self, context: BuildContext) -> nn.Module:
        gpt.token_loss = _fused_loss
        wrapped = super().wrap(context)
        wrapped.trainer = _Trainer(wrapped)  # type: ignore[assignment]
        return wrapped

    def microbatch(self, model: Any, *, sync: bool) -> AbstractContextManager[object]:
        return _with_metrics(model.trainer, super().microbatch(model, sync=sync))


class LlmFoundry01(_UnderComposer, TorchFsdp1Of2022):
    """Composer's Trainer and metrics around torch 1.13's FSDP1."""

    name = "llm-foundry-0.1"
    summary = "llm-foundry 0.1 (Composer 0.14, torch 1.13's FSDP1, attention in Triton)"


class LlmFoundry04(_UnderComposer):
    """Composer's Trainer and metrics around torch 2.1's FSDP1, collectives on streams of their own."""

    name = "llm-foundry-0.4"
    summary = "llm-foundry 0.4 (Composer 0.17, torch 2.1's FSDP1, flash attention 2 with unpadding)"
    attention_backward: ClassVar[float] = 0.578
    """Flash attention's rate backward over today's; fitted to llm-foundry's runs on H100."""

    def wrap(self, context: BuildContext) -> nn.Module:
        from fsdpbench.sim.accelerator import ACCELERATOR

        ACCELERATOR.collectives_on_own_streams = True
        slow_attention_backward(self.attention_backward)
        wrapped = super().wrap(context)
        for module in wrapped.modules():
            if isinstance(module, gpt.GPTAttention):
                vars(module)["attend"] = partial(_unpadded, module.attend)
        return wrapped


class _Trainer:
    """Keeps a microbatch's outputs until the next one's, and updates metrics from them."""

    def __init__(self, wrapped: nn.Module) -> None:
        self._outputs: Tensor | None = None
        model = next(module for module in wrapped.modules() if isinstance(module, gpt.GPT))
        model.lm_head.register_forward_hook(self._keep)

    def _keep(self, head: nn.Module, inputs: Any, logits: Tensor) -> None:
        self._outputs = logits

    @torch.no_grad()
    def update_metrics(self) -> None:
        """Raises: RuntimeError, nothing was trained before."""
        if self._outputs is None:
            raise RuntimeError("metrics of a microbatch that had no forward")
        rows = self._outputs.flatten(0, -2)
        targets = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for _ in _METRICS:
            with torch.autocast(rows.device.type, torch.bfloat16):
                F.cross_entropy(rows, targets, reduction="sum")


@contextmanager
def _with_metrics(trainer: _Trainer, inner: AbstractContextManager[object]) -> Iterator[None]:
    with inner:
        yield
        trainer.update_metrics()


def _fused_loss(logits: Tensor, targets: Tensor, in_fp32: bool) -> Tensor:
    loss: Tensor = _FusedCrossEntropy.apply(logits.flatten(0, 1))
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """What the fused loss reads and writes; a simulated tensor holds no numbers to compute it from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.amax(1).float().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        result: Tensor = rows * gradient
        return result


def _unpadded(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend` over packed [batch, heads, length, size]: what packing copies, and where it waits."""
    batch, heads, length, size = query.shape
    mask = torch.ones(batch * length, dtype=torch.bool, device=query.device)
    packed = []
    for tensor in (query, key, value):
        places = torch.arange(batch * length, device=query.device)
        for _wait in ("nonzero", "longest"):
            mask.any().item()
        rows = tensor.transpose(1, 2).reshape(batch * length, heads * size)
        packed.append(rows.index_select(0, places).view(batch, length, heads, size).transpose(1, 2))
    mixed = attend(*packed).transpose(1, 2).reshape(batch * length, heads * size)
    padded: Tensor = _Pad.apply(mixed, places)
    return padded.view(batch, length, heads, size).transpose(1, 2)


class _Pad(torch.autograd.Function):
    """Rows put at `places` of zeros; its backward takes them from there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return torch.zeros_like(rows).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None
