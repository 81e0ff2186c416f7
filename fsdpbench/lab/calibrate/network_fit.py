"""Fit a profile's network to measured collectives (`nccl_tests.py`).

Between nodes, the figures that differ between clusters are fitted (see `sim.model.network`) and replace those
of the base profile:

    bandwidth   nic.gb_s_per_node (achieved, so `nic.efficiency` becomes 1)
    latency     nic_hop_us of every protocol, scaled by one factor
    call        nic.base_us; with a single number of nodes it cannot be separated: scaled like latency
    tree        nic.tree_share, if an all-reduce among three or more nodes was measured

The fit minimizes the squared logarithms of measured over simulated times, so that all sizes count equally. A
robust loss limits the influence of a single bad size. A figure on which the sizes hardly depend keeps the
base's value, and is reported. Inside a node the measured times become curves, one for each collective
and number of ranks.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import rendered_beside, to_toml
from fsdpbench.base.writing import write_whole
from fsdpbench.lab.calibrate.calibration import Calibration
from fsdpbench.lab.calibrate.nccl_tests import Point
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import HardwareProfile, load_profile
from fsdpbench.sim.model.sections import RankCurve

LIBRARY = "nccl-tests"
_BANDWIDTH, _LATENCY, _CALL, _TREE = "bandwidth", "latency", "call", "tree"
# A figure is fitted if reducing it by 10 % changes some measured time by at least 2 %.
_STEP, _LEAST_EFFECT = math.log(0.9), 0.02
_FARTHEST = math.log(30.0)  # from the best of the grid; beyond it, values are invalid in a profile
_MOST_CURVE_POINTS = 40


@dataclass(frozen=True)
class NetworkFit:
    """A profile with a fitted network, and how well it reproduces the measured times.

    `fitted` are the figures that the sizes determine, `kept` those that keep the base's value; `errors` are
    simulated over measured, minus 1, in the order of `between`.
    """

    profile: HardwareProfile
    fitted: tuple[str, ...]
    kept: tuple[str, ...]
    between: tuple[Point, ...]
    inside: tuple[Point, ...]
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return statistics.fmean(map(abs, self.errors)) if self.errors else 0.0

    @property
    def worst(self) -> tuple[float, Point] | None:
        """Return the largest error and its point."""
        pairs = zip(self.errors, self.between, strict=True)
        return max(pairs, key=lambda pair: abs(pair[0]), default=None)

    def lines(self, before: HardwareProfile) -> list[str]:
        """Return the findings next to the figures of the profile `before`, one fact per line."""
        kinds = sorted({f"{point.kind} of {point.ranks}" for point in self.inside})
        values = {"fit": self, "before": before, "kinds": kinds, "hop_us": slowest_hop_us}
        return rendered_beside(__file__, "network_fit.jinja", **values).splitlines()

    def record(self, path: Path, before: HardwareProfile) -> dict[str, object]:
        """Return the same as `lines` as JSON."""
        worst = self.worst
        return {
            "schema": 1,
            "file": str(path),
            "base": before.name,
            "sizes": {"between_nodes": len(self.between), "inside_a_node": len(self.inside)},
            "fitted": list(self.fitted),
            "kept": list(self.kept),
            "gb_s_per_node": self.profile.nic.gb_s_per_node if self.between else None,
            "hop_us": slowest_hop_us(self.profile) if self.between else None,
            "base_us": self.profile.nic.base_us if self.between else None,
            "mean_error": self.mean_error,
            "worst": {"error": worst[0], "point": dataclasses.asdict(worst[1])} if worst else None,
        }

    def write(self, path: Path, base: str) -> None:
        """Write the profile's file, based on the packaged profile `base`."""
        before = load_profile(base)
        measured = {f"nic.{name}" for name in ("gb_s_per_node", "efficiency")} if self.between else set()
        measured |= {"nic.base_us", "nic.protocols"} if _LATENCY in self.fitted else set()
        measured |= {"nic.tree_share"} if _TREE in self.fitted else set()
        count = len(self.between) + len(self.inside)
        source = f"{base}; its network fitted to {count} measured collectives (nccl-tests)"
        profile = dataclasses.replace(self.profile, name=path.stem, title=before.title, source=source)
        estimated = tuple(key for key in before.estimated if key not in measured)
        tables = Calibration(profile, base, tuple(measured), estimated, {}).to_toml_tables()
        if self.inside:
            tables["runs_use"] = list(profile.runs_use)
            collectives = {
                kind: [{"ranks": c.ranks, "points": c.points} for c in curves]
                for kind, curves in profile.libraries[LIBRARY].collectives.items()
            }
            library = {"version": LIBRARY, "source": source, "collectives": collectives}
            tables["libraries"] = {LIBRARY: library}
        write_whole(path, to_toml(tables))
        load_profile(path)


def slowest_hop_us(profile: HardwareProfile) -> float:
    """Return the latency in us of a hop between nodes with the protocol for large buffers."""
    return max(protocol.nic_hop_us for protocol in profile.nic.protocols)


def fit_network(points: Sequence[Point], base: HardwareProfile, node: int | None = None) -> NetworkFit:
    """Fit the network of `base` to `points`, on nodes of `node` GPUs (None: as measured).

    Raises:
        UsageError: no measured collective can be compared, or the times are so far from any such network
            that a fit would be meaningless.
    """
    between = tuple(point for point in points if point.nodes > 1)
    inside = tuple(point for point in points if point.nodes == 1 and point.ranks > 1)
    if not between and not inside:
        raise UsageError("--nccl-tests: no all-gather, reduce-scatter or all-reduce of two or more ranks")
    profile = base
    if between:
        profile = dataclasses.replace(
            base,
            gpus_per_node=node or between[0].ranks // between[0].nodes,
            nic=dataclasses.replace(
                base.nic, gb_s_per_node=base.nic.gb_s_per_node * base.nic.efficiency, efficiency=1.0
            ),
        )
    if inside:
        profile = _with_curves(profile, inside)
    names = _names(between)
    fitted = tuple(name for name in names if _effect(profile, name, between) >= _LEAST_EFFECT)
    if between and _BANDWIDTH not in fitted:
        raise UsageError(error_text("network_fit.no_large_size"))
    if fitted:
        profile = _fitted(profile, fitted, between)
    errors = tuple(float(math.expm1(-residual)) for residual in _residuals(profile, between))
    kept = tuple(name for name in (_BANDWIDTH, _LATENCY, _TREE) if between and name not in fitted)
    return NetworkFit(profile, fitted, kept, between, inside, errors)


def _names(between: Sequence[Point]) -> tuple[str, ...]:
    if not between:
        return ()
    trees = any(point.kind == "all_reduce" and point.nodes > 2 for point in between)
    several = len({point.nodes for point in between}) > 1
    return (_BANDWIDTH, _LATENCY, *([_CALL] if several else []), *([_TREE] if trees else []))


def _fitted(profile: HardwareProfile, names: Sequence[str], between: Sequence[Point]) -> HardwareProfile:
    def residuals(logs: np.ndarray) -> np.ndarray:
        return _residuals(_scaled(profile, dict(zip(names, map(float, logs), strict=True))), between)

    # Times have kinks where protocol or tree changes, so start the search at the best of a coarse grid.
    rest = [0.0] * (len(names) - 2)
    latencies = (0.4, 1.0, 2.5) if _LATENCY in names else (1.0,)
    grid = [
        np.array([math.log(share), math.log(latency), *rest][: len(names)])
        for share in np.geomspace(0.005, 2.0, 12)
        for latency in latencies
    ]
    start = min(grid, key=lambda logs: float(np.abs(residuals(logs)).sum()))

    def slopes(logs: np.ndarray) -> np.ndarray:
        # Simulated times are whole nanoseconds, so scipy's default step size would not change them.
        steps = np.eye(len(names)) * -_STEP
        return np.column_stack([(residuals(logs + step) - residuals(logs)) / -_STEP for step in steps])

    bounds = (start - _FARTHEST, start + _FARTHEST)
    found = least_squares(residuals, start, slopes, loss="soft_l1", f_scale=0.1, bounds=bounds, max_nfev=40)
    return _scaled(profile, dict(zip(names, map(float, found.x), strict=True)))


def _scaled(profile: HardwareProfile, logs: dict[str, float]) -> HardwareProfile:
    """Return the profile with its network figures multiplied by exp(logs)."""
    nic, latency = profile.nic, math.exp(logs.get(_LATENCY, 0.0))
    scaled = dataclasses.replace(
        nic,
        gb_s_per_node=nic.gb_s_per_node * math.exp(logs.get(_BANDWIDTH, 0.0)),
        base_us=nic.base_us * math.exp(logs.get(_CALL, logs.get(_LATENCY, 0.0))),
        tree_share=min(1.0, nic.tree_share * math.exp(logs.get(_TREE, 0.0))),
        protocols=tuple(
            dataclasses.replace(protocol, nic_hop_us=protocol.nic_hop_us * latency)
            for protocol in nic.protocols
        ),
    )
    return dataclasses.replace(profile, nic=scaled)


def _residuals(profile: HardwareProfile, points: Sequence[Point]) -> np.ndarray:
    """Return ln(measured / simulated) of each point."""
    networks: dict[int, Network] = {}
    found = []
    for point in points:
        network = networks.setdefault(point.ranks, Network(profile, point.ranks, point.ranks // point.nodes))
        simulated = network.collective_ns(point.kind, point.nbytes, range(point.ranks))
        found.append(math.log(point.us * 1e3 / simulated))
    return np.array(found)


def _effect(profile: HardwareProfile, name: str, points: Sequence[Point]) -> float:
    """Return the largest change of a point's time, as a logarithm, if a figure is reduced by 10 %."""
    moved = _residuals(_scaled(profile, {name: _STEP}), points)
    return float(np.abs(moved - _residuals(profile, points)).max())


def _with_curves(profile: HardwareProfile, inside: Sequence[Point]) -> HardwareProfile:
    """Return the profile with measured curves inside a node, which take precedence for training runs."""
    from fsdpbench.sim.model.sections import LibraryTables

    times: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in inside:
        times[point.kind, point.ranks][point.nbytes].append(point.us)
    curves: dict[str, list[RankCurve]] = defaultdict(list)
    for (kind, ranks), by_size in sorted(times.items()):
        curves[kind].append(RankCurve(ranks, _rising(by_size)))
    tables = LibraryTables(
        version=LIBRARY, source=LIBRARY, collectives={kind: tuple(found) for kind, found in curves.items()}
    )
    uses = (LIBRARY, *(name for name in profile.runs_use if name != LIBRARY))
    return dataclasses.replace(profile, libraries={**profile.libraries, LIBRARY: tables}, runs_use=uses)


def _rising(by_size: dict[int, list[float]]) -> tuple[tuple[float, float], ...]:
    """Return points of bytes and median us; the times never decrease."""
    sizes = sorted(by_size)
    kept = sizes[:: math.ceil(len(sizes) / _MOST_CURVE_POINTS)]
    times = np.maximum.accumulate([statistics.median(by_size[size]) for size in kept])
    return tuple((float(size), float(us)) for size, us in zip(kept, times, strict=True))
