"""Views keep what torch says of them: their mode, their version, the tensor they are of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.simulated

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:, ::2],
    "of a view": lambda x: x[1:][1:].view(-1),
    "chunk": lambda x: x.chunk(2)[1],
    "expand": lambda x: x[:1].expand(4, 8),
    "another dtype": lambda x: x.view(torch.int32),
}


def _facts(base: torch.Tensor, view: torch.Tensor) -> tuple[object, ...]:
    geometry = view.shape, view.stride(), view.storage_offset(), view.dtype
    shared = view.untyped_storage() is base.untyped_storage()
    versions = [None if tensor.is_inference() else tensor._version for tensor in (base, view)]
    return (*geometry, shared, view.is_inference(), view._is_view(), view._base is base, *versions)


def _found(device: str, view: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[object, ...]]:
    found = []
    for base_mode in (False, True):
        for view_mode in (False, True):
            with torch.inference_mode(base_mode):
                base = torch.zeros(4, 8, device=device)
                base.add_(1)
            with torch.inference_mode(view_mode):
                found.append(_facts(base, view(base)))
    return found


def test_views_are_as_those_of_the_host() -> None:
    from fsdpbench.sim import Simulation
    from fsdpbench.sim.model.profile import load_profile

    Simulation.start(load_profile("a100-80gb"), 1, 1)
    for name, view in VIEWS.items():
        assert _found("sim", view) == _found("cpu", view), name


def test_results_with_strides_of_their_own_are_as_those_of_the_host() -> None:
    from fsdpbench.sim import Simulation
    from fsdpbench.sim.model.profile import load_profile

    Simulation.start(load_profile("a100-80gb"), 1, 1)
    for mode in (False, True):
        facts = []
        for device in ("sim", "cpu"):
            with torch.inference_mode(mode):
                made = torch.zeros(4, 8, device=device).t() + 1
            facts.append((made.stride(), made.is_inference(), made._is_view(), made.requires_grad))
        assert facts[0] == facts[1]
