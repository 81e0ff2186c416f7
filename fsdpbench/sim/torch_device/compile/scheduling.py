"""Inductor's scheduling of Triton kernels, which here are planned and not compiled."""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.torch_device.compile.wrapper import PlanWrapper
from fsdpbench.torch_internals import TritonScheduling


class PlanScheduling(TritonScheduling):
    """Fusion, splitting and naming are Inductor's; a kernel's source is made for its name, and dropped."""

    def _emit_kernel_to_wrapper(
        self, wrapper: PlanWrapper, kernel: Any, src_code: str, kernel_name: str, *about: Any
    ) -> None:
        wrapper.define_kernel(kernel_name, f"plan.kernel({kernel_name!r})", "")
