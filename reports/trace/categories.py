"""What the profiler's categories of events mean here, and what it means that one is not known.

The names are Kineto's (libkineto/include/ActivityType.h) and those of torch 1.8 to 1.11.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from fsdpbench.reports.trace.model import Category

CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "hip_driver": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "cuda_sync": Category.SYNC,
    "xpu_sync": Category.SYNC,
    # Names of torch 1.8 to 1.11.
    "Operator": Category.CPU_OP,
    "Runtime": Category.RUNTIME,
    "Kernel": Category.KERNEL,
    "Memcpy": Category.MEMCPY,
    "Memset": Category.MEMSET,
}

_IGNORED = frozenset(
    (
        *("", "Trace", "ac2g", "fwdbwd", "async", "async_gpu", "async_cpu_to_gpu", "async_cpu_gpu"),
        *("python_function", "cpu_instant_event", "overhead", "collective_comm", "cuda_profiler_range"),
        *("gpu_pm_counter", "external_correlation", "cuda_event", "PythonFunction", "User Annotation"),
        *("forward_backward", "External"),
    )
)
"""Other categories of Kineto, which say nothing of what is measured here."""

# Accelerators whose work Kineto writes in categories of its own, none of them "kernel".
_ACCELERATOR = re.compile(
    r"^(mtia|hpu|glow|xla|tpu|npu|ascend|neuron|musa|mlu|ipu|vulkan|mps|metal|gcu|dlc|sdaa|supa)([_ ]|$)",
    re.I,
)
_MODULE = "nn.Module: "


@dataclass(frozen=True)
class Unknown:
    """`problems` take the trust away, `remarks` do not; each a line."""

    problems: list[str]
    remarks: list[str]


def is_module(category: str, name: str) -> bool:
    """Whether an event is the frame of a module's call (`with_modules`, `with_stack`)."""
    return category == "python_function" and name.startswith(_MODULE)


def unknown_categories(found: Counter[str], on_device: bool) -> Unknown:
    """What to say of complete events by category. `on_device`: kernels or copies are there as well."""
    unknown = {name: count for name, count in found.items() if name not in _IGNORED}
    accelerators = {name: count for name, count in unknown.items() if _ACCELERATOR.match(name)}
    others = {name: count for name, count in unknown.items() if name not in accelerators}
    problems = []
    if accelerators:
        problems.append(
            f"the trace holds work of an accelerator that is not known here ({_listed(accelerators)}): it "
            "does not count, so computation, communication and idle time of that device are not known"
        )
    if not others:
        return Unknown(problems, [])
    told = f"events of categories that are not known do not count: {_listed(others)}"
    if on_device or accelerators:
        return Unknown(problems, [told])
    # Nothing else says what a device did: these may be its work.
    return Unknown([f"{told}; if they are a device's work, the figures lack it"], [])


def _listed(counts: dict[str, int]) -> str:
    some = ", ".join(f"{name[:40]!r} ({counts[name]})" for name in sorted(counts)[:5])
    return some + (f" and {len(counts) - 5} more" if len(counts) > 5 else "")
