"""A GPU with Triton, as Inductor queries them, simulated from the hardware profile.

Inductor's lowering queries the GPU's properties (to split reductions), whether Triton is available (otherwise
it refuses), and how to write device guards. Fake tensors need no device, so it lowers for "cuda" on any
machine. All replacements are undone afterwards.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fsdpbench.base.torch_internals import (
    DeviceOpOverrides,
    DispatchKey,
    device_interface,
    inductor_common,
    patched,
    replaced,
    run_and_save_rng_state,
    run_with_rng_state,
)
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE
from fsdpbench.sim.torch_device.patches.dynamo import passing_to
from fsdpbench.sim.torch_device.tensors import is_on_device, tensors_in

_FEW_THREADS = ((8, 6), (8, 9), (12, 0))
"""Compute capabilities whose multiprocessors hold 1,536 threads; data-centre GPUs hold 2,048 (CUDA
programming guide, technical specifications by compute capability)."""


def properties() -> Any:
    """Return the simulated GPU's `torch.cuda.get_device_properties`."""
    found = torch.get_device_module(DEVICE_TYPE).get_device_properties()
    capability = (found.major, found.minor)
    names = ("name", "major", "minor", "total_memory", "multi_processor_count", "warp_size")
    return SimpleNamespace(
        **{name: getattr(found, name) for name in names},
        max_threads_per_multi_processor=1536 if capability in _FEW_THREADS else 2048,
        regs_per_multiprocessor=65536,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
    )


class _DeviceCode(DeviceOpOverrides):
    """Source code in the wrapper that enters a device and gets its stream."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"from fsdpbench.sim.torch_device.compile.plan import raw_stream as {name}"

    def set_device(self, device_idx: int) -> str:
        return "pass"

    def synchronize(self) -> str:
        return "torch.sim.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        return "plan.running()"

    def current_stream(self) -> str:
        return "torch.sim.current_stream()"


def _interface() -> type:
    """Return the compiler's interface of the device "cuda"."""
    found = properties()

    class Pretended(device_interface.DeviceInterface):
        class Worker:
            set_device = staticmethod(lambda device: None)
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: found)

        device = nullcontext
        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        synchronize = staticmethod(lambda device=None: None)
        get_device_properties = staticmethod(lambda device=None: found)
        get_compute_capability = staticmethod(lambda device=None: found.major * 10 + found.minor)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    return Pretended


@contextmanager
def pretended_gpu(scheduling: type, wrapper: type) -> Iterator[None]:
    """Lower for "cuda" inside the context, with these two classes instead of Inductor's."""
    list(
        device_interface.get_registered_device_interfaces()
    )  # otherwise they are registered inside the context and override its entries
    inductor_common.init_backend_registration()
    inductor_common.get_device_op_overrides("cuda")  # registers all overrides
    with ExitStack() as stack:
        found = properties()
        capability = (found.major, found.minor)
        stack.enter_context(
            replaced(
                torch.cuda,
                device_count=lambda: 1,
                current_device=lambda: 0,
                get_device_capability=lambda device=None: capability,
                get_device_properties=lambda device=None: found,
                is_bf16_supported=lambda including_emulation=True: True,
                device=nullcontext,
                # Offset and seed for operators recomputed with the same random numbers: 16 bytes on the host.
                get_rng_state=lambda device="cuda": torch.empty(16, dtype=torch.uint8, device="cpu"),
                set_rng_state=lambda new_state, device="cuda": None,
            )
        )
        # The bindings of these methods need a device guard, which builds without CUDA lack.
        copied, made, plain = torch.ops.aten.copy_, torch.ops.aten.contiguous, torch.contiguous_format
        own: dict[str, Any] = {
            "__invert__": lambda tensor: torch.bitwise_not(tensor),
            "contiguous": lambda x, memory_format=plain: made.default(x, memory_format=memory_format),
            "copy_": lambda x, source, non_blocking=False: copied.default(x, source, non_blocking),
        }
        stack.enter_context(replaced(torch.Tensor, **own))
        stack.enter_context(replaced(torch.version, cuda=torch.version.cuda or "12.8"))
        stack.enter_context(patched("triton_hash", lambda original: lambda: "simulated"))
        for module in list(sys.modules.values()):  # many modules import it by name
            if getattr(module, "__name__", "").startswith("torch.") and "has_triton" in vars(module):
                stack.enter_context(replaced(module, has_triton=lambda: True))
        codegen = inductor_common.DeviceCodegen(scheduling, wrapper, None, None)
        for table, value in (
            (device_interface.device_interfaces, _interface()),
            (inductor_common.device_op_overrides_dict, _DeviceCode()),
            (inductor_common.device_codegens, codegen),
        ):
            stack.enter_context(mock.patch.dict(table, cuda=value))
        yield


_STATE_BYTES = 16
"""Bytes of a CUDA generator's state: seed and offset."""


def install_random_numbers() -> None:
    """Make the partitioner's two wrappers of recomputed operators accept tensors of the device.

    Operators that backward recomputes, e.g. attention, must draw the same random numbers: one wrapper saves
    the generator's state, the other restores it. Operators of the simulated device draw no numbers.
    """
    select: Any = DispatchKey.BackendSelect
    for wrapper, call in ((run_and_save_rng_state, _saving), (run_with_rng_state, _restoring)):
        # `py_impl` clears the cached dispatch of earlier calls on the CPU.
        wrapper.py_impl(select)(passing_to(call)(wrapper.py_kernels.pop(select)))


def _saving(original: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(map(is_on_device, tensors_in(args, kwargs))):
        return original(op, *args, **kwargs)
    return torch.zeros(_STATE_BYTES, dtype=torch.uint8), op(*args, **kwargs)


def _restoring(original: Callable[..., Any], rng_state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(map(is_on_device, tensors_in(args, kwargs))):
        return original(rng_state, op, *args, **kwargs)
    return op(*args, **kwargs)
