"""Grouping blocks changes where they hang, not what they compute."""

import pytest
import torch
from torch import nn

from fsdpbench.workloads import WorkloadError, get_workload
from fsdpbench.workloads.blocks import BlockGroup, group_blocks

SHAPE = {"layers": 5, "d_model": 32, "heads": 4, "vocab": 64, "max_seq": 16}


def build():
    torch.manual_seed(0)
    return get_workload("gpt", shape=SHAPE).build("every-2")


@pytest.mark.parametrize(("count", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (8, [5])])
def test_groups_hold_consecutive_blocks(count, sizes):
    model = build()
    before = list(model.blocks)
    group_blocks(model, count)
    assert [len(group) for group in model.blocks] == sizes
    assert all(isinstance(group, BlockGroup) for group in model.blocks)
    assert [block for group in model.blocks for block in group] == before


def test_loss_and_gradients_are_the_same(tiny, one_batch):
    results = []
    for count in (None, 2):
        torch.manual_seed(0)
        model = tiny.build("every-2")
        if count is not None:
            group_blocks(model, count)
            assert sum(isinstance(module, BlockGroup) for module in model.modules()) >= 1
        loss = model(*one_batch(tiny))
        loss.backward()
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    (plain, plain_gradients), (grouped, gradients) = results
    assert torch.equal(plain, grouped)
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, gradients, strict=True))


def test_each_stack_of_an_encoder_decoder_is_grouped_by_itself():
    with torch.device("meta"):
        model = get_workload("t5-tiny", shape={"layers": 5}).build()
    group_blocks(model, 2)
    for stack in (model.encoder, model.decoder):
        assert [len(group) for group in stack.blocks] == [2, 2, 1]


def test_further_arguments_reach_every_block():
    class Scale(nn.Module):
        def forward(self, x, factor):
            return x * factor

    assert BlockGroup(Scale(), Scale())(torch.ones(2), 3.0).tolist() == [9.0, 9.0]


def test_what_cannot_be_grouped_is_refused():
    with pytest.raises(WorkloadError, match="grouped by 0"):
        group_blocks(build(), 0)
    with pytest.raises(WorkloadError, match="Linear has no list of blocks"):
        group_blocks(nn.Linear(2, 2), 2)
