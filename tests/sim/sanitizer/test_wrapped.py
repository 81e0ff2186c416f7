"""Tensors that wrap others have no memory; what is inside them is followed."""

from __future__ import annotations

from typing import Any

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


def test_pinning_a_wrapper_pins_what_is_inside() -> None:
    from extended_parameters import Quantised
    from sanitized import start

    start()
    wrapper = Quantised(torch.ones(8))
    assert not wrapper.is_pinned()
    pinned: Any = wrapper.pin_memory()
    assert pinned.is_pinned()
    assert pinned.inner.is_pinned()


def test_gathers_of_both_kinds_are_waited_for_before_offloaded_parameters_are_written() -> None:
    """Extended and plain parameters are copied on two streams: each has its own last copy."""
    import trained_models
    import training_programs as programs

    arguments = {"extended": True, "offload": True}
    told = trained_models.run(trained_models.Case("impl-fsdp2", programs.write_after_evaluation, arguments))
    assert not told["findings"]
