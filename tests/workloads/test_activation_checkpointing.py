"""Activation checkpointing changes what is kept and computed, never the result."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.workloads import ActivationCheckpointing, WorkloadError, get_workload
from fsdpbench.workloads.rotations import rotary_tables

SHAPE = {"layers": 4, "d_model": 32, "heads": 4, "vocab": 64, "max_seq": 16}


def loss_and_gradients(workload, batch, activation_checkpointing):
    torch.manual_seed(3)
    model = workload.build(activation_checkpointing)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = model(*batch)
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()], sum(kept)


@pytest.mark.parametrize("value", ["full", "every-2", "op", "op-every-1", "op-every-3"])
def test_loss_and_gradients_are_bitwise_those_without(value, tiny, one_batch):
    batch = one_batch(tiny)
    plain_loss, plain_gradients, plain_kept = loss_and_gradients(tiny, batch, "none")
    loss, gradients, kept = loss_and_gradients(tiny, batch, value)
    assert torch.equal(plain_loss, loss)
    assert len(gradients) == len(plain_gradients) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, gradients, strict=True))
    assert kept < plain_kept


@pytest.mark.parametrize("family", ["gpt", "llama", "t5"])
def test_each_block_has_its_own_choice(family, one_batch):
    """Over all stacks in forward's order; more blocks that recompute keep less, and give the same."""
    shape = {"layers": 2} if family == "t5" else {"layers": 4}
    workload = get_workload(f"{family}-tiny", shape=shape)
    batch = one_batch(workload)
    by_block = ["none", "full:1+none:3", "full:2+op:1+none:1", "full:3+op:1", "full"]
    found = [loss_and_gradients(workload, batch, value) for value in by_block]
    assert all(torch.equal(found[0][0], loss) for loss, _, _ in found)
    for _, gradients, _ in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], gradients, strict=True))
    kept = [each[2] for each in found]
    assert kept == sorted(kept, reverse=True)
    flops = [workload.flops_per_step(2, None, value).hardware for value in by_block]
    assert flops == sorted(set(flops))


def test_more_checkpointing_keeps_less(one_batch):
    workload = get_workload("gpt", shape=SHAPE)
    batch = one_batch(workload)
    kept = [loss_and_gradients(workload, batch, value)[2] for value in ("none", "every-4", "every-2", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


@pytest.mark.parametrize(
    ("value", "blocks"),
    [
        *[("none", []), ("full", [0, 1, 2, 3, 4]), ("every-2", [0, 2, 4]), ("every-9", [0])],
        *[("full:2", [0, 1]), ("every-2:3", [0, 2]), ("full:9+head", [0, 1, 2, 3, 4]), ("none+head", [])],
    ],
)
def test_which_blocks(value, blocks):
    checkpointing = ActivationCheckpointing.parse(value)
    assert [index for index in range(5) if checkpointing.applies_to(index)] == blocks
    assert not checkpointing.by_operator


@pytest.mark.parametrize(
    ("value", "kept"), [("op", [0, 2, 4, 6]), ("op-every-1", range(7)), ("op-every-4", [0, 4])]
)
def test_which_products(value, kept):
    checkpointing = ActivationCheckpointing.parse(value)
    assert [index for index in range(7) if checkpointing.keeps_product(index)] == list(kept)
    assert [checkpointing.applies_to(index) for index in range(5)] == [True] * 5


class Products(TorchDispatchMode):
    """The output sizes of products with weights, in order."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.sizes.append(output.shape[-1])
        return output


@pytest.mark.parametrize(
    ("value", "again"),
    [
        ("full", ["query", "key", "value", "output", "gate", "up"]),
        ("op", ["key", "output", "up"]),
        ("op-every-1", []),
        ("op-every-3", ["key", "value", "gate", "up"]),
    ],
)
def test_what_is_computed_again(value, again):
    """Llama's seven products: which of them run in the recomputation, seen by their widths."""
    widths = {"query": 32, "key": 16, "value": 16, "output": 32, "gate": 80, "up": 80, "down": 32}
    workload = get_workload(
        "llama", shape={"layers": 1, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 80, "vocab": 64}
    )
    model = workload.build(value)
    x = torch.randn(1, 8, 32, requires_grad=True)
    with Products() as forward:
        output = model.blocks[0](x, *rotary_tables(8, 8, 10000, x))
    assert forward.sizes == list(widths.values())
    # What is recomputed comes first; then the backward of the last product begins.
    with Products() as backward:
        output.sum().backward()
    assert backward.sizes[: len(again)] == [widths[name] for name in again]
    assert len(backward.sizes) == len(again) + 2 * len(widths)


@pytest.mark.parametrize(
    "value", ["all", "every-0", "every-", "every-2x", "op-2", "op-every-0", "", "full:0", "full:", "+head"]
)
def test_unknown_value_is_refused(value, tiny):
    with pytest.raises(WorkloadError, match=r"use none, full, every-K .* op or op-every-K"):
        tiny.build(value)


def test_checkpointed_blocks_run_plainly_without_gradients(tiny, one_batch):
    *inputs, targets = one_batch(tiny)
    model = tiny.build("full")
    with torch.no_grad():
        predictions = model(*inputs)
    assert predictions.shape[: targets.dim()] == targets.shape
