"""Host costs: what one operator, view, launch, hook or call occupies the CPU for, in nanoseconds."""

from __future__ import annotations

from fsdpbench.sim.model.profile import HardwareProfile


class CpuCosts:
    """Constants in integer nanoseconds, read once from a profile, as attributes for hot paths.

    ``operator_ns``: dispatch of an operator that launches a kernel, the launch excluded; ``view_ns``: an
    operator without a kernel; ``launch_ns``: a kernel launch; ``autograd_node_ns``: one node of the
    backward graph; ``module_call_ns``: one ``nn.Module.__call__``; ``hook_ns``: one Python hook;
    ``collective_ns``: the call of a collective, its launch included; ``event_ns``: record, wait or query of
    an event; ``stream_ns``: switching the current stream; ``synchronize_ns``: the call of a
    synchronisation, waiting excluded.
    """

    __slots__ = (
        "autograd_node_ns",
        "collective_ns",
        "event_ns",
        "hook_ns",
        "launch_ns",
        "module_call_ns",
        "operator_ns",
        "stream_ns",
        "synchronize_ns",
        "view_ns",
    )

    def __init__(self, profile: HardwareProfile) -> None:
        for slot in self.__slots__:
            microseconds = getattr(profile.cpu, slot.removesuffix("_ns") + "_us")
            setattr(self, slot, round(microseconds * 1000))

    autograd_node_ns: int
    collective_ns: int
    event_ns: int
    hook_ns: int
    launch_ns: int
    module_call_ns: int
    operator_ns: int
    stream_ns: int
    synchronize_ns: int
    view_ns: int
