"""`calibrate --from-result` finds the factors that runs were made with and how sure they are; or refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.lab.calibrate.from_results import Factor, MeasuredRun, fit, runs_of_results
from fsdpbench.reports.result import Result, Status
from fsdpbench.sim.model.profile import load_profile

BASE = "a100-80gb"


def config(gpus: int = 16, batch: int = 2, device: str = "cuda") -> Config:
    return Config(
        model="gpt-125m",
        shape={},
        system="torch-fsdp1",
        device=device,
        hardware=BASE if device == "sim" else None,
        gpus=gpus,
        gpus_per_node=8,
        settings=Settings.of(batch=batch),
        measurement=Measurement(2, 1, 0, timeout_s=60.0),
    )


def seconds(hardware: str | Path, computing: float, sending: float) -> float:
    """A step of products and of traffic between nodes, one after the other, on a profile."""
    profile = load_profile(hardware)
    return computing / profile.gemm.under_load + sending / profile.nic.gb_s_per_node


def simulated(works: Sequence[tuple[float, float]]) -> Callable[[Path], list[dict[str, Any]]]:
    return lambda path: [Result(status=Status.OK, step_time_s=seconds(path, *work)) for work in works]


def measured(name: str, value: float, gpus: int = 16, batch: int = 2) -> MeasuredRun:
    return MeasuredRun(name, config(gpus, batch), "step_time_s", value, False, BASE)


def times(works: Sequence[tuple[float, float]], compute: float, network: float) -> list[float]:
    profile = load_profile(BASE)
    return [
        a / (profile.gemm.under_load * compute) + b / (profile.nic.gb_s_per_node * network) for a, b in works
    ]


def test_one_run_gives_one_factor_with_its_bar(tmp_path: Path) -> None:
    works = [(1.0, 300.0)]
    (value,) = times(works, 1.0, 0.4)
    found = fit([measured("a", value)], BASE, [Factor.NETWORK], simulated(works), tmp_path)
    assert found.profile.factors[Factor.NETWORK] == pytest.approx(0.4, rel=0.01)
    low, high = found.interval(Factor.NETWORK)
    assert low < 0.4 < high
    assert abs(found.before[0]) > 0.3
    assert abs(found.after[0]) < 0.005


def test_the_bar_is_wider_the_less_the_run_depends_on_the_factor(tmp_path: Path) -> None:
    widths = []
    for number, work in enumerate([(0.2, 300.0), (2.0, 300.0)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (value,) = times([work], 1.0, 0.8)
        found = fit([measured("a", value)], BASE, [Factor.NETWORK], simulated([work]), folder)
        widths.append(found.log_widths[Factor.NETWORK])
    assert widths[1] > 1.5 * widths[0]


def test_a_network_that_limits_only_where_it_is_slow_is_found(tmp_path: Path) -> None:
    def step(path: Path) -> float:
        return max(1.0, 96.0 / load_profile(path).nic.gb_s_per_node)

    found = fit(
        [measured("a", 1.6)],
        BASE,
        [Factor.NETWORK],
        lambda path: [Result(status=Status.OK, step_time_s=step(path))],
        tmp_path,
    )
    assert found.profile.keys()["nic"]["gb_s_per_node"] == pytest.approx(60.0, rel=0.01)


def test_two_runs_tell_two_factors_apart(tmp_path: Path) -> None:
    works = [(1.0, 20.0), (0.2, 300.0)]
    runs = [measured(str(n), value, batch=n + 1) for n, value in enumerate(times(works, 0.8, 0.5))]
    found = fit(runs, BASE, [Factor.COMPUTE, Factor.NETWORK], simulated(works), tmp_path)
    assert found.profile.factors[Factor.COMPUTE] == pytest.approx(0.8, rel=0.02)
    assert found.profile.factors[Factor.NETWORK] == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("works", "factors", "gpus", "compute", "why"),
    [
        ([(1.0, 100.0)], [Factor.COMPUTE, Factor.NETWORK], 16, 1.0, "2 factors need as many different runs"),
        ([(1.0, 0.1)], [Factor.NETWORK], 16, 0.9, "they say nothing of it"),
        ([(1.0, 0.0)], [Factor.NETWORK], 8, 0.9, "no run is on several nodes"),
        ([(1.0, 0.0)], [Factor.COMPUTE], 8, 0.1, "not an error of a profile"),
        ([(1.0, 0.0)], [Factor.COMPUTE], 8, 1.2, "even at the chip's peak"),
    ],
)
def test_it_refuses_what_the_runs_do_not_say(
    tmp_path: Path,
    works: list[tuple[float, float]],
    factors: list[Factor],
    gpus: int,
    compute: float,
    why: str,
) -> None:
    runs = [measured("a", value, gpus) for value in times(works, compute, 1.0)]
    with pytest.raises(UsageError, match=why):
        fit(runs, BASE, factors, simulated(works), tmp_path)


def test_runs_that_depend_on_two_factors_alike_do_not_give_both(tmp_path: Path) -> None:
    works = [(1.0, 100.0), (1.001, 100.0)]
    runs = [measured(str(n), value, batch=n + 1) for n, value in enumerate(times(works, 0.9, 0.9))]
    with pytest.raises(UsageError):
        fit(runs, BASE, [Factor.COMPUTE, Factor.NETWORK], simulated(works), tmp_path)


def result_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    result = {
        "config": config().to_dict(),
        "status": "ok",
        "step_time_s": 1.0,
        "hardware": {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 84_974_239_744, "simulated": False},
        "measured": {"step_times_s": [0.99, 1.0, 1.01]},
        "alloc_retries_per_step": 0.0,
    }
    (folder / "result.json").write_text(json.dumps(result | changes))
    return folder


def test_a_result_of_gpus_names_its_chip_and_its_noise(tmp_path: Path) -> None:
    (run,) = runs_of_results([result_file(tmp_path / "run")], "cuda")
    assert run.chip == BASE
    assert 0.005 < run.noise < 0.01
    assert run.slower(Result(status=Status.OK, step_time_s=2.0)) == pytest.approx(-math.log(2.0))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hardware": {"name": "A100", "simulated": True}}, "a simulated GPU"),
        ({"config": config(device="sim").to_dict()}, "ran on sim"),
        ({"status": "oom", "step_time_s": None}, "has no step time"),
        ({"alloc_retries_per_step": 2.0}, "allocator retried"),
        ({"config": {}}, "not the result of a run"),
    ],
)
def test_results_that_say_nothing_of_a_gpu_are_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        runs_of_results([result_file(tmp_path / "run", **changes)], "cuda")


@pytest.mark.campaign
def test_the_command_finds_the_network_that_a_run_had(fsdpbench: Any, tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text(
        'base = "a100-80gb"\nname = "slow"\ntitle = "slow"\nsource = "test"\n[nic]\ngb_s_per_node = 60\n'
    )
    words = [
        "--model",
        "gpt-1.3b",
        "--device",
        "sim",
        "--gpus",
        "16",
        "--batch",
        "2",
        "--system",
        "torch-fsdp1",
    ]
    ran = fsdpbench("run", *words, "--hardware", str(slow), "-o", str(tmp_path / "run"))
    assert ran.returncode == 0, ran.stderr
    mine = tmp_path / "mine.toml"
    again = ["--device", "sim", "--base", "a100-80gb", "--fit", "network", "-o", str(mine), "--json"]
    assert fsdpbench.json("calibrate", "--from-result", str(tmp_path / "run"), *again)["factors"][0][
        "factor"
    ] == pytest.approx(0.3, rel=0.03)
    assert load_profile(mine).nic.gb_s_per_node == pytest.approx(60, rel=0.03)
