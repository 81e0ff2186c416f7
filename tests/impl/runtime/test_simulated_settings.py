"""Settings of ``FSDPModule`` that are about streams and memory, on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_cases import LAYERS, UNIT_BYTES, WIDTH, Layer, simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl


def build(layers: int = LAYERS, **arguments: Any) -> Any:
    arguments["mesh"] = init_device_mesh("sim", (8,))
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    for layer in model:
        impl.fully_shard(layer, **arguments)
    return impl.fully_shard(model, **arguments)


def measure(held: int) -> tuple[int, int]:
    """Nanoseconds and peak of a step whose reduce-scatters take longer than its backward."""
    with simulated() as device:
        from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

        model = build(reshard_after_forward=False)
        model.set_reshard_after_backward(False)  # so that gradients are all that backward adds
        model.set_reduce_scatter_max_input_buffers(held)
        batch = torch.empty(64, WIDTH, device=device)
        for _ in range(3):
            torch.sim.synchronize()
            start = ACCELERATOR.timeline.cpu
            torch.sim.reset_peak_memory_stats()
            model(batch).sum().backward()
            torch.sim.synchronize()
        return ACCELERATOR.timeline.cpu - start, torch.sim.max_memory_allocated()


def case_held_gradients(rank: int) -> None:
    times, peaks = zip(*(measure(held) for held in (1, 3)), strict=True)
    assert times[1] <= times[0], times
    assert peaks[1] - peaks[0] > 1.9 * UNIT_BYTES, peaks  # the gradients of two more units


def test_gradients_may_wait_for_their_reduction(lone_process) -> None:
    lone_process.run(case_held_gradients)


def case_shared_streams(rank: int, *, shared: bool) -> None:
    with simulated() as device:
        from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

        models = [build(2) for _ in range(3)]
        if shared:
            impl.share_comm_ctx(models)
        before = len(ACCELERATOR.streams)
        batch = torch.empty(8, WIDTH, device=device)
        for model in models:
            batch = model(batch)
        batch.sum().backward()
        assert len(ACCELERATOR.streams) - before == (4 if not shared else 0) * 3
        if not shared:
            with pytest.raises(RuntimeError, match="before the first forward"):
                impl.share_comm_ctx(models)
        with pytest.raises(ValueError, match="expected modules under fully_shard"):
            impl.share_comm_ctx([nn.Linear(2, 2)])  # type: ignore[list-item]
        impl.share_comm_ctx([])


@pytest.mark.parametrize("shared", [True, False])
def test_roots_share_their_streams(lone_process, shared: bool) -> None:
    lone_process.run(case_shared_streams, shared=shared)


def case_stream_of_a_hook(rank: int, *, own: bool) -> None:
    with simulated() as device:
        model = build(2)
        stream = torch.sim.Stream() if own else None
        seen: list[Any] = []
        for module in (*model, model):
            module.set_all_reduce_hook(lambda shard: seen.append(torch.sim.current_stream()), stream=stream)
        model(torch.empty(8, WIDTH, device=device)).sum().backward()
        assert len(seen) == 2
        assert len(set(seen)) == 1
        assert (seen[0] == stream) == own
        assert seen[0] != torch.sim.current_stream()


@pytest.mark.parametrize("own", [True, False])
def test_a_hook_runs_on_its_stream(lone_process, own: bool) -> None:
    lone_process.run(case_stream_of_a_hook, own=own)
