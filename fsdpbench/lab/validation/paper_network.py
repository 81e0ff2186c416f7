"""Figure 2 of the FSDP paper (arXiv 2304.11277): all-gathers alone, predicted by only the network model.

Neither the number of GPUs nor the machines are published. 2^30 fp32 elements in 92 ms are 47 GB/s, which
is the bandwidth of 4 x 100 Gb/s per host; 1.2 ms for the smallest piece is the latency of a ring of about a
hundred ranks. So 16 hosts of that kind are assumed. The size in figure 2a is the one that the network moves
in the published time of its first bar; the ratios of the other bars to it are predicted.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.lab.validation.runs.case import Case, Figure, published
from fsdpbench.reports.result import Result
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sweep.planning import configured, make_target
from fsdpbench.sweep.runner import UNTRACED, simulate
from fsdpbench.sweep.trials import Progress

_HARDWARE = "a100-40gb"
_GPUS = 128
_ELEMENTS = 1 << 30
_FP32 = 4


def network_predictions(
    gpus: int = _GPUS, nic_gb_s: float | None = None, efficiency: float | None = None
) -> "list[Prediction]":
    """Return every point of the figure with the network model's prediction, for `gpus` in total.

    `nic_gb_s`: total bandwidth of a node's NICs, `efficiency`: the share of it that collectives reach; the
    defaults are the profile's.
    """
    profile = load_profile(_HARDWARE)
    nic = dataclasses.replace(
        profile.nic,
        gb_s_per_node=nic_gb_s or profile.nic.gb_s_per_node,
        efficiency=efficiency or profile.nic.efficiency,
    )
    profile = dataclasses.replace(profile, nic=nic)
    network = Network(profile, gpus, profile.gpus_per_node)
    ranks = range(gpus)

    def gather_ms(nbytes: int, *, uneven: bool = False) -> float:
        return network.collective_ns("all_gather", nbytes, ranks, uneven=uneven) / 1e6

    ways, pieces = published("2a").along("all-gather"), published("2b").along("2^30 fp32 elements")
    even_ms = next(iter(ways.values()))
    # The size that takes the published time at the rate of the largest message.
    size = round(_ELEMENTS * _FP32 * even_ms / gather_ms(_ELEMENTS * _FP32))
    copy_ms = KernelCosts(profile).memory_bound_ns(2 * size, "copy") / 1e6
    uneven_ms = gather_ms(size, uneven=True)
    taken = [gather_ms(size), gather_ms(size) + copy_ms, uneven_ms, uneven_ms]
    return [
        *(
            _prediction("2a", f"{way}", found, took, gpus)
            for (way, found), took in zip(ways.items(), taken, strict=True)
        ),
        *(
            _prediction("2b", f"in {n} pieces", found, int(n) * gather_ms(_ELEMENTS * _FP32 // int(n)), gpus)
            for n, found in pieces.items()
        ),
    ]


def _prediction(figure: str, what: str, published_ms: float, predicted_ms: float, gpus: int) -> "Prediction":
    case = Case(
        name=f"all-gather {what}",
        group=f"FSDP paper, Fig {figure}",
        source="arXiv 2304.11277",
        model="",
        hardware=_HARDWARE,
        gpus=gpus,
        settings={},
        published={Figure.MILLISECONDS: published_ms},
        system="network model",
        assumed="16 hosts of 8 GPUs and 4 x 100 Gb/s; size of Fig 2a from its first bar",
    )
    return Prediction(case, Result.of({"status": "ok", "step_time_s": predicted_ms / 1e3}))


@dataclass(frozen=True)
class Prediction:
    """A case with the result of its simulation."""

    case: Case
    result: Result

    def predicted(self, figure: Figure) -> float | None:
        """Return the value in the published figure's unit; `None` if the simulation did not finish."""
        value = self.result.stored(".".join(figure.path))
        return None if value is None else float(value) / figure.unit

    def error(self, figure: Figure) -> float | None:
        """Return the relative error: of the step time for a speed (above 0: predicted slow), else its own."""
        predicted, published = self.predicted(figure), self.case.published[figure]
        if not predicted or not published:
            return None
        return published / predicted - 1 if figure.is_speed else predicted / published - 1

    @property
    def speed(self) -> Figure | None:
        return next((figure for figure in self.case.published if figure.is_time), None)

    @property
    def step_time_error(self) -> float | None:
        return None if self.speed is None else self.error(self.speed)


def config_of(case: Case, system: str | None = None, measurement: Measurement = UNTRACED) -> Config:
    """Return the configuration of the case, with its own system unless `system` is given."""
    target = make_target(
        model=case.model,
        shape=case.shape,
        hardware=case.hardware,
        gpus=case.gpus,
        measurement=measurement,
        software=case.software,
    )
    return configured(target, system or case.system, **case.settings)


def predict(
    cases: Sequence[Case], system: str | None, folder: Path, progress: Progress, jobs: int | None = None
) -> "list[Prediction]":
    """Run the cases that `folder` does not hold yet, and return every case with its result, in order. A case
    that its system does not support has status `not_applicable`."""
    configs = [config_of(case, system) for case in cases]
    results = simulate(configs, folder, progress, jobs)
    return [
        Prediction(case, results[content_key(config)]) for case, config in zip(cases, configs, strict=True)
    ]
