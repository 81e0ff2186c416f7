"""Tensors that wrap others have no memory; what is inside them is followed."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.simulated


def test_a_write_through_a_wrapper_on_the_host_is_seen() -> None:
    from extended_parameters import Quantised
    from sanitized import kinds, start

    sanitizer = start()
    inner = torch.ones(1 << 16).pin_memory()
    wrapper = Quantised(inner)
    inner.to("sim", non_blocking=True)
    wrapper.mul_(2)
    assert kinds(sanitizer) == ["read_before_ready"]


def test_waiting_for_the_copy_orders_it() -> None:
    from extended_parameters import Quantised
    from sanitized import kinds, start

    sanitizer = start()
    inner = torch.ones(1 << 16).pin_memory()
    wrapper = Quantised(inner)
    inner.to("sim", non_blocking=True)
    torch.sim.synchronize()
    wrapper.mul_(2)
    assert not kinds(sanitizer)


def test_a_wrapped_parameter_has_its_role() -> None:
    from extended_parameters import Quantised
    from sanitized import matrix, start

    sanitizer = start()
    inner = matrix()
    parameter = torch.nn.Parameter(Quantised(inner))
    parameter.grad = Quantised(matrix())
    optimizer = torch.optim.SGD([parameter])
    optimizer.step()
    with torch.sim.stream(torch.sim.Stream()):
        inner.sum()
    (found,) = sanitizer.findings
    assert found.role == "parameter (256 x 256)"
