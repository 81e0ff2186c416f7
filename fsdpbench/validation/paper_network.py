"""Figure 2 of the FSDP paper (arXiv 2304.11277): all-gathers alone, by the network model alone.

Neither the number of GPUs nor the machines are published. 2^30 fp32 elements in 92 ms are 47 GB/s,
which is what 4 x 100 Gb/s a host carry; 1.2 ms for the smallest piece is the latency of a ring of about
a hundred ranks. So: 16 hosts of that kind. The size of figure 2a is the one that the network carries in
the published time of its first bar; the ratio of the others to it is what is predicted.
"""

from __future__ import annotations

from fsdpbench.sim.costs import KernelCosts
from fsdpbench.sim.hardware import load_profile
from fsdpbench.sim.network import Network
from fsdpbench.validation.case import Case, Figure
from fsdpbench.validation.predict import Prediction

_HARDWARE = "a100-40gb"
_GPUS = 128
_EVEN_MS, _LIST_MS, _UNEVEN_MS = 17.92, 19.29, 20.05
_ELEMENTS = 1 << 30
_FP32 = 4
# Elements a piece (2^30 and its halves): milliseconds for all pieces together.
_PIECES_MS = {
    1: 92.1, 2: 92.0, 4: 94.1, 8: 94.4, 16: 96.2, 32: 102.7, 64: 141.0, 128: 195.2, 256: 305.2,
}  # fmt: skip


def network_predictions() -> list[Prediction]:
    """Every point of the figure beside the network model's answer."""
    profile = load_profile(_HARDWARE)
    network = Network(profile, _GPUS, profile.gpus_per_node)
    ranks = range(_GPUS)

    def gather_ms(nbytes: int, *, uneven: bool = False) -> float:
        return network.collective_ns("all_gather", nbytes, ranks, uneven=uneven) / 1e6

    size = _size_of(_EVEN_MS, gather_ms(_ELEMENTS * _FP32))
    copy_ms = KernelCosts(profile).memory_bound_ns(2 * size, "copy") / 1e6
    predictions = [
        _prediction("2a", "into one tensor", _EVEN_MS, gather_ms(size)),
        _prediction("2a", "into a list", _LIST_MS, gather_ms(size) + copy_ms),
        _prediction("2a", "uneven inputs", _UNEVEN_MS, gather_ms(size, uneven=True)),
    ]
    for pieces, published in _PIECES_MS.items():
        each = gather_ms(_ELEMENTS * _FP32 // pieces)
        predictions.append(_prediction("2b", f"in {pieces} pieces", published, pieces * each))
    return predictions


def _size_of(published_ms: float, whole_ms: float) -> int:
    """Bytes that take the published time, at the rate of the largest message."""
    return round(_ELEMENTS * _FP32 * published_ms / whole_ms)


def _prediction(figure: str, what: str, published_ms: float, predicted_ms: float) -> Prediction:
    case = Case(
        name=f"all-gather {what}",
        group=f"FSDP paper, Fig {figure}",
        source="arXiv 2304.11277",
        model="",
        hardware=_HARDWARE,
        gpus=_GPUS,
        settings={},
        published={Figure.MILLISECONDS: published_ms},
        system="network model",
        assumed="16 hosts of 8 GPUs and 4 x 100 Gb/s; size of Fig 2a from its first bar",
    )
    return Prediction(case, {"status": "ok", "step_time_s": predicted_ms / 1e3})
