"""What torch 1.13's FSDP1 did otherwise: laid over today's, each by what it does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsdpbench.sim.torch_device import software
from fsdpbench.workloads import replacements


class Queue:
    """A rate limiter's queue that counts who asked, and who waited."""

    def __init__(self) -> None:
        self.asked = self.waited = 0

    def dequeue_if_needed(self) -> Queue:
        self.asked += 1
        return self

    def synchronize(self) -> None:
        self.waited += 1


@pytest.mark.parametrize(
    ("training_state", "prefetched", "limited", "asked"),
    [
        ("BACKWARD_PRE", True, True, 1),
        ("BACKWARD_PRE", False, True, 0),  # its own unshard has asked
        ("BACKWARD_PRE", True, False, 0),
        ("BACKWARD_POST", True, True, 0),
        ("FORWARD", True, True, 0),
    ],
)
def test_the_limiter_is_asked_for_a_prefetched_unit_before_its_backward(
    training_state: str, prefetched: bool, limited: bool, asked: int
) -> None:
    queue, calls = Queue(), []
    state = SimpleNamespace(limit_all_gathers=limited, _free_event_queue=queue)
    handle = SimpleNamespace(_training_state=SimpleNamespace(name=training_state), _prefetched=prefetched)
    software.limit_then_prefetch(lambda *args: calls.append((args, queue.asked)), state, handle, "mode")
    assert (queue.asked, queue.waited) == (asked, asked)
    assert calls == [((state, handle, "mode"), asked)]  # torch's own comes after


@pytest.mark.parametrize("elements", [8, 6])
def test_a_gradient_is_always_copied(elements: int) -> None:
    gradient = torch.arange(float(elements))
    padded, shard = software.padded_copy(SimpleNamespace(world_size=4), gradient)
    assert padded.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr()
    assert padded.tolist() == gradient.tolist() + [0.0] * (8 - elements)
    assert shard.tolist() == [0.0, 0.0]


def test_checkpointing_is_reentrant() -> None:
    x = torch.ones(2, requires_grad=True)
    y = replacements.reentrant(torch.exp, x, use_reentrant=False, preserve_rng_state=False, early_stop=False)
    assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"
