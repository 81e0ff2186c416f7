"""Activation checkpointing changes what is kept and computed, never the result."""

import pytest
import torch

from workloads import ActivationCheckpointing, WorkloadError, get_workload

SHAPE = {"layers": 4, "d_model": 32, "heads": 4, "vocab": 64, "max_seq": 16}


def loss_and_gradients(workload, batch, activation_checkpointing):
    torch.manual_seed(3)
    model = workload.build(activation_checkpointing)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = model(*batch)
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()], sum(kept)


@pytest.mark.parametrize("value", ["full", "every-2", "op"])
def test_loss_and_gradients_are_bitwise_those_without(value, tiny, one_batch):
    batch = one_batch(tiny)
    plain_loss, plain_gradients, plain_kept = loss_and_gradients(tiny, batch, "none")
    loss, gradients, kept = loss_and_gradients(tiny, batch, value)
    assert torch.equal(plain_loss, loss)
    assert len(gradients) == len(plain_gradients) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, gradients, strict=True))
    assert kept < plain_kept


def test_more_checkpointing_keeps_less(one_batch):
    workload = get_workload("gpt", shape=SHAPE)
    batch = one_batch(workload)
    kept = [loss_and_gradients(workload, batch, value)[2] for value in ("none", "every-4", "every-2", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


@pytest.mark.parametrize(
    ("value", "blocks"), [("none", []), ("full", [0, 1, 2, 3, 4]), ("every-2", [0, 2, 4]), ("every-9", [0])]
)
def test_which_blocks(value, blocks):
    checkpointing = ActivationCheckpointing.parse(value)
    assert [index for index in range(5) if checkpointing.applies_to(index)] == blocks
    assert checkpointing.recomputed(5) == len(blocks)


def test_by_operator_keeps_costly_outputs_and_recomputes_no_product():
    full, by_operator = ActivationCheckpointing.parse("full"), ActivationCheckpointing.parse("op")
    assert by_operator.recomputed(5) == 0
    assert [by_operator.applies_to(index) for index in range(5)] == [True] * 5
    assert by_operator != full


@pytest.mark.parametrize("value", ["all", "every-0", "every-", "every-2x", ""])
def test_unknown_value_is_refused(value, tiny):
    with pytest.raises(WorkloadError, match="use none, full, every-K"):
        tiny.build(value)


def test_checkpointed_blocks_run_plainly_without_gradients(tiny, one_batch):
    *inputs, targets = one_batch(tiny)
    model = tiny.build("full")
    with torch.no_grad():
        predictions = model(*inputs)
    assert predictions.shape[: targets.dim()] == targets.shape
