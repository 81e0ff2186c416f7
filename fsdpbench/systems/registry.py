"""The systems under test by name: fsdpbench's own, and plugins, which are loaded on first use."""

from fsdpbench.base.errors import unknown
from fsdpbench.base.files.documents import rows_beside
from fsdpbench.base.plugins import SYSTEMS, Loader, Offer, plugins
from fsdpbench.systems.base import System
from fsdpbench.systems.deepspeed_zero3 import DeepSpeedZero3
from fsdpbench.systems.fsdp1 import ImplFsdp1, TorchFsdp1
from fsdpbench.systems.fsdp2 import ImplFsdp2, TorchFsdp2
from fsdpbench.systems.megatron_fsdp import MegatronFsdp
from fsdpbench.systems.unsharded import Single, TorchDdp


class Fsdp1OfItsTime(TorchFsdp1):
    """FSDP1 with the software of a past date, which published runs used (simulated only).

    Training runs the installed torch. The software profile adds the differences in time and memory
    (`fsdpbench/sim/profiles/software`).
    """

    devices = frozenset({"sim"})

    def __init__(self, name: str, software: str, summary: str) -> None:
        self.name, self.software, self.summary = name, software, summary


_OWN: dict[str, System] = {
    system.name: system
    for system in (
        ImplFsdp2(),
        ImplFsdp1(),
        TorchFsdp2(),
        TorchFsdp1(),
        *(Fsdp1OfItsTime(**each) for each in rows_beside(__file__, "earlier.csv")),
        TorchDdp(),
        Single(),
        DeepSpeedZero3(),
        MegatronFsdp(),
    )
}


def _flaw(name: str, loaded: object) -> str | None:
    if not isinstance(loaded, System):
        return f"is {type(loaded).__name__}, no fsdpbench.systems.System"
    own = getattr(loaded, "name", None)
    return None if own == name else f"calls itself {own!r}: both names must be equal"


PLUGINS = Loader[System](SYSTEMS, "system", _OWN, _flaw)


def get_system(name: str) -> System:
    """Return the system `name`. Raise `UsageError` with similar names, or with a plugin's problem."""
    if name in _OWN:
        return _OWN[name]
    if name not in plugins():
        raise unknown("system", name, [*_OWN, *plugins()], "fsdpbench list systems")
    return PLUGINS.load(name)


def private_names() -> tuple[int, list[str]]:
    """Return the number of torch's private names in use, and a sentence for each that this torch lacks."""
    from fsdpbench.base import torch_internals as of_the_bench
    from fsdpbench.impl.shared import torch_internals as of_impl

    gone = [*of_the_bench.missing(), *of_impl.missing()]
    return of_the_bench.uses() + len(of_impl.INTERNALS), gone


def offers() -> list[Offer[System]]:
    """Return all systems that can be chosen, fsdpbench's own first."""
    return [*(Offer(name, "fsdpbench", system) for name, system in _OWN.items()), *PLUGINS.offers()]
