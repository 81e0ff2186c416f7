"""What Composer's trainer and llm-foundry's GPT do beside FSDP: each by itself, then in simulated steps."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.systems import composer
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.gpt import GPT, GPTShape

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

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def of(way: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = way(*(part.transpose(1, 2) for part in fused.unbind(2)))
        (gradient,) = torch.autograd.grad(mixed.square().sum(), fused)
        return mixed, gradient

    with Calls() as calls:
        packed = of(lambda *parts: composer._unpadded(attend, *parts))
    for one, other in zip(packed, of(attend), strict=True):
        torch.testing.assert_close(one, other)
    assert calls.count["_local_scalar_dense"] == 6
    assert calls.count["index_select"] == 4  # three to pack, one behind the padding in backward


def test_outputs_live_until_the_next_microbatchs(model: GPT) -> None:
    trainer = composer._Trainer(model)
    held = []
    for _ in range(2):
        loss = model(tokens(), tokens())
        held.append(weakref.ref(trainer._outputs))
        loss.backward()
        assert held[-1]() is not None
    assert held[0]() is None


def test_metrics_are_two_cross_entropies(model: GPT) -> None:
    trainer = composer._Trainer(model)
    with pytest.raises(RuntimeError, match="no forward"):
        trainer.update_metrics()
    with Calls() as calls, composer._with_metrics(trainer, nullcontext()):
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
        loss = composer._fused_loss(logits, torch.zeros(2, 16, dtype=torch.int64), False)
    assert [tensor.data_ptr() for tensor in saved] == [logits.data_ptr()]
    assert not calls.log_probabilities
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype is torch.bfloat16


def run(fsdpbench: Any, tmp_path: Any, system: str) -> dict[str, Any]:
    done = fsdpbench(
        "run", "--model", "gpt-350m", "--device", "sim", "--gpus", "8", "--hardware", "h100-80gb",
        "--shape", "fp32_loss=false", "--system", system, "--batch", "16",
        "--reduce-dtype", "bf16", "-o", str(tmp_path / system), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_what_the_trainer_does_costs_time_and_memory(fsdpbench: Any, tmp_path: Any) -> None:
    plain, early, late = (
        run(fsdpbench, tmp_path, system)
        for system in ("torch-fsdp1-1.13", "llm-foundry-0.1", "llm-foundry-0.4")
    )
    rows = 16 * 2048
    logits = rows * 50304
    # Twice log-probabilities and their copy in fp32: 20 bytes a logit, at 3.35 TB/s at most.
    assert early["step_time_s"] > plain["step_time_s"] - 0.002 + 20 * logits / 3.35e12
    # Packing copies q, k, v and the output of every layer, forward and backward: 8 passes, read and write.
    assert late["step_time_s"] > early["step_time_s"] + 24 * 8 * 4 * rows * 1024 / 3.35e12
    # Its packed copies are kept for backward, beside nothing that could be let go: the padded output.
    grown = late["peak_memory_bytes"]["allocated"] - early["peak_memory_bytes"]["allocated"]
    assert grown == pytest.approx(24 * 2 * rows * 1024, rel=0.1)


def test_other_models_are_refused(fsdpbench: Any) -> None:
    done = fsdpbench(
        "run", "--model", "llama2-7b", "--device", "sim", "--gpus", "8", "--system", "llm-foundry-0.1"
    )
    assert "not_applicable: llm-foundry-0.1" in done.stdout
    assert "runs are of GPTs, not of llama2-7b" in done.stdout
