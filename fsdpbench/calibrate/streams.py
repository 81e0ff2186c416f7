"""What kernels of two streams take from each other: `ContentionProfile.kernel_share`.

    one stream    [product][product]...[product]                     L
    another       [copy][copy]...[copy]                              S, not longer
    both          [product, slowed][..........][product]             L + kernel_share * S
                  [copy, slowed][...]

A GPU fills with the blocks of one kernel what another leaves free. Two kernels that want the same then win
nothing (1), a product and a copy less than that.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from fsdpbench.calibrate.machine import Machine
from fsdpbench.sim.hardware.sections import ContentionProfile

_SIZE = 8192
_PRODUCTS = 8
_ROUNDS = 5


def measure_kernel_share(machine: Machine, contention: ContentionProfile) -> ContentionProfile:
    """`contention` with the share that bf16 products and copies of this device show."""
    a, source = machine.empty(_SIZE, _SIZE), machine.empty(_SIZE, _SIZE)
    target = machine.empty(_SIZE, _SIZE)

    def product() -> object:
        return a @ a

    def copy() -> object:
        return target.copy_(source)

    longer = machine.device_seconds(product) * _PRODUCTS
    one_copy = machine.device_seconds(copy)
    copies = max(1, int(longer / one_copy))
    both = statistics.median(_together(machine, product, copy, copies) for _ in range(_ROUNDS))
    share = (both - longer) / (copies * one_copy)
    return dataclasses.replace(contention, kernel_share=min(1.0, max(0.0, share)))


def _together(
    machine: Machine, product: Callable[[], object], copy: Callable[[], object], copies: int
) -> float:
    """Seconds until products and copies on two streams are done, which begin at the same moment."""
    module = machine.module
    first, second = module.current_stream(), module.Stream()
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    product()  # while it runs, the host queues the rest
    start.record(first)
    second.wait_event(start)
    for _ in range(_PRODUCTS):
        product()
    with module.stream(second):
        for _ in range(copies):
            copy()
    first.wait_stream(second)
    end.record(first)
    module.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
