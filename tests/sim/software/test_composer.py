"""What Composer's trainer and llm-foundry's GPT do beside FSDP, each by itself."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.engine.devices.sim import Trainer
from fsdpbench.sim.model.software import TrainerSoftware
from fsdpbench.sim.model.timeline import Timeline
from fsdpbench.workloads import replacements
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.families.gpt import GPT, GPTAttention, GPTShape

COMPOSER = TrainerSoftware(keeps_outputs=True, metrics=2)
SHAPE = GPTShape(layers=1, d_model=32, heads=2, vocab=64, max_seq=16, bias=False)


class Calls(TorchDispatchMode):
    """Counts operators, and the dtypes that log_softmax returns."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.log_probabilities: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.count[name] += 1
        if name == "_log_softmax":
            self.log_probabilities.append(result.dtype)
        return result


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE, 16, ActivationCheckpointing.parse("none")).bfloat16()


def tokens() -> torch.Tensor:
    return torch.randint(SHAPE.vocab, (2, 16))


def test_packing_changes_nothing_but_waits_six_times() -> None:
    fused = torch.randn(2, 8, 3, 2, 4, requires_grad=True)
    attention = GPTAttention(SHAPE, 1.0)

    def of(way: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = way(*(part.transpose(1, 2) for part in fused.unbind(2)))
        (gradient,) = torch.autograd.grad(mixed.square().sum(), fused)
        return mixed, gradient

    with Calls() as calls:
        packed = of(partial(replacements.unpadded, attention))
    for one, other in zip(packed, of(attention.attend), strict=True):
        torch.testing.assert_close(one, other)
    assert calls.count["_local_scalar_dense"] == 6
    assert calls.count["index_select"] == 4  # three to pack, one behind the padding in backward


def test_outputs_live_until_the_next_microbatchs(model: GPT) -> None:
    trainer = Trainer(COMPOSER, model, Timeline())
    held = []
    for _ in range(2):
        loss = model(tokens(), tokens())
        held.append(weakref.ref(trainer._outputs))
        loss.backward()
        assert held[-1]() is not None
    assert held[0]() is None


def test_metrics_are_two_cross_entropies(model: GPT) -> None:
    trainer = Trainer(COMPOSER, model, Timeline())
    with pytest.raises(RuntimeError, match="no forward"):
        trainer.update_metrics()
    with Calls() as calls, trainer.microbatch():
        model(tokens(), tokens()).backward()
    before = len(calls.log_probabilities)
    with Calls() as calls:
        trainer.update_metrics()
    assert len(calls.log_probabilities) == 2
    assert before == 3  # and the loss's own


def test_the_fused_loss_holds_no_log_probabilities() -> None:
    logits = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        Calls() as calls,
    ):
        loss = replacements.fused_cross_entropy(logits, torch.zeros(2, 16, dtype=torch.int64), False)
    assert [tensor.data_ptr() for tensor in saved] == [logits.data_ptr()]
    assert not calls.log_probabilities
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype is torch.bfloat16
