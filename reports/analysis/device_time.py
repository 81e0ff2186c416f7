"""When the device comes to what the CPU did: the CPU allocates, and the work that uses it runs later.

CPU      alloc A | launch a | alloc B | launch b          a CPU that is far ahead allocates early
device                          [   a   ][   b   ]
A, B by the device's clock      A         B
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fsdpbench.reports.analysis.device.activity import Activity
from fsdpbench.reports.trace.model import Int64

Clock = Callable[[Int64], Int64]


def device_clock(activity: Activity) -> Clock | None:
    """From times of the CPU to when the device began what was launched next; None where that is unknown (a
    CPU's trace, or one without launches).

    The stream that computes most is the clock. Behind its last launch time continues as the CPU's, though not
    before that work has ended. Order is kept: of two times the later one is never the earlier one there.
    """
    main = activity.work.mainline()
    if activity.kind != "gpu" or not len(main.launch):
        return None
    starts = np.maximum.accumulate(main.start)
    end = int(main.end.max())

    def clock(times: Int64) -> Int64:
        following = np.searchsorted(main.launch, times, side="left")
        last = len(starts) - 1
        reached: Int64 = np.where(following <= last, starts[np.minimum(following, last)], end)
        return np.maximum(times, reached)

    return clock
