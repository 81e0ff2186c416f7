"""Blocks can be compiled whole, checkpointed or not, and compute the same."""

import pytest
import torch
from torch._dynamo.utils import counters

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.base import TokenWorkload
from fsdpbench.workloads.losses import ComputesTokenLoss, token_loss


@pytest.fixture(autouse=True)
def _forget_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def loss_and_gradients(workload, batch, activation_checkpointing, compiled):
    torch.manual_seed(0)
    model = workload.build(activation_checkpointing)
    for module in model.modules():
        if compiled and isinstance(module, workload.block_classes):
            # Dynamo's and autograd's part of compiling; no C++ compiler is needed.
            module.compile(backend="aot_eager")
        if compiled and isinstance(module, ComputesTokenLoss):
            module.compiled_loss = torch.compile(token_loss, backend="aot_eager")
    loss = model(*batch)
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


def one_block(workload):
    """The family's tiny model with one block (a stack): each costs a compilation."""
    fields = {"layers": 1} if "layers" in workload.shape else {"widths": "32", "depths": "1"}
    return get_workload(f"{workload.family}-tiny", shape=fields)


def check(workload, batch, value):
    loss, gradients = loss_and_gradients(workload, batch, value, compiled=False)
    compiled_loss, compiled_gradients = loss_and_gradients(workload, batch, value, compiled=True)
    # Each block became one graph, and the loss: nothing was left to run uncompiled.
    loss_graphs = isinstance(workload, TokenWorkload)
    assert counters["stats"]["unique_graphs"] == len(workload.block_classes) + loss_graphs
    assert not counters["graph_break"]
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.plain_cases("gpt", "dhen")
def test_checkpointed_blocks_compile_to_the_same(tiny, one_batch):
    check(one_block(tiny), one_batch(tiny), "full")


@pytest.mark.campaign
@pytest.mark.parametrize("value", ["none", "op"])
def test_so_do_other_ways_of_checkpointing(value, one_batch):
    workload = one_block(get_workload("llama-tiny"))
    check(workload, one_batch(workload), value)
