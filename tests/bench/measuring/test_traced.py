"""Which steps are timed and which are traced, on a device where tracing costs time and on one where not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Measurement
from fsdpbench.engine.measuring.warmup import TimedSteps, WarmUp, time_and_trace


@dataclass(frozen=True)
class Retried:
    alloc_retries: int


@dataclass
class Recorder:
    """A device whose steps take 1, 2, 3... seconds; a trace is the list of steps that it holds."""

    tracing_is_free: bool
    count: int = 0
    traces: list[list[int]] = field(default_factory=list)
    open: bool = False

    def timed_step(self, step: Callable[[], object]) -> float:
        step()
        self.count += 1
        if self.open:
            self.traces[-1].append(self.count)
        return float(self.count)

    @contextmanager
    def trace(self, path: Path) -> Iterator[Recorder]:
        self.traces.append([])
        self.open = True
        yield self
        self.open = False

    def step(self) -> None:
        assert self.open


def run(
    device: Recorder, timed: int, traced: int, retrying: tuple[int, ...] = (), stable: bool = True
) -> tuple[list[float], list[float]]:
    """Seconds of the timed steps, and of those that a profiler made longer."""
    measurement = Measurement(0, timed, traced, timeout_s=1.0, most_timed_steps=8 if retrying else 0)
    steps = TimedSteps(
        lambda: device.timed_step(lambda: None), lambda: Retried(int(device.count in retrying))
    )
    profiled: list[float] = []
    warm = WarmUp([], stable)
    time_and_trace(measurement, warm, steps, device, lambda: None, Path("trace") / "t.json.gz", profiled)
    return steps.times_s, profiled


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_profiler_that_costs_time_has_steps_of_its_own() -> None:
    device = Recorder(tracing_is_free=False)
    assert run(device, timed=3, traced=2) == ([1.0, 2.0, 3.0], [4.0, 5.0])
    assert device.traces == [[4, 5]]


@pytest.mark.parametrize(
    ("timed", "traced", "of_trace"), [(1, 1, [1]), (3, 1, [3]), (3, 2, [2, 3]), (1, 3, [1, 2, 3])]
)
def test_where_tracing_is_free_the_last_timed_steps_are_the_traced_ones(
    timed: int, traced: int, of_trace: list[int]
) -> None:
    device = Recorder(tracing_is_free=True)
    times, profiled = run(device, timed, traced)
    assert times == [float(number) for number in range(1, timed + 1)]
    assert profiled == []
    assert device.traces == [of_trace]


def test_of_steps_that_retry_the_last_timed_one_is_traced() -> None:
    known_before, found_out = Recorder(tracing_is_free=True), Recorder(tracing_is_free=True)
    times, _ = run(known_before, timed=1, traced=1, retrying=(2, 5), stable=False)
    assert (len(times), known_before.traces) == (8, [[8]])
    times, _ = run(found_out, timed=1, traced=1, retrying=(1,))
    assert (len(times), found_out.traces[-1]) == (8, [8])


@pytest.mark.parametrize("free", [True, False])
def test_untraced_steps_leave_nothing(free: bool, tmp_path: Path) -> None:
    device = Recorder(tracing_is_free=free)
    assert run(device, timed=2, traced=0) == ([1.0, 2.0], [])
    assert device.traces == []
    assert list(tmp_path.iterdir()) == []


def result_of(fsdpbench: Any, folder: Path, *words: str) -> dict[str, Any]:
    return dict(
        fsdpbench.json(
            "run",
            "--model",
            "gpt-125m",
            "--gpus",
            "8",
            "--device",
            "sim",
            "--json",
            *words,
            "-o",
            str(folder),
        )
    )


@pytest.mark.parametrize("words", [(), ("--jitter", "1"), ("--set", "graph=step")])
def test_the_simulated_traced_step_is_the_timed_one(
    fsdpbench: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """To the nanosecond: with jitter no two steps are alike, and a trace of another step would show."""
    result = result_of(fsdpbench, tmp_path / "run", *words)
    assert result["config"]["measurement"]["traced_steps"] == 1
    assert result["traced_step_time_s"] == result["step_time_s"]
    assert result["measured"]["step_times_s"] == [result["step_time_s"]]
    assert result["measured"]["profiler_overhead"] is None


def test_traffic_and_operators_of_a_simulated_step_do_not_depend_on_how_many_are_traced(
    in_forks: Any, tmp_path: Path, fsdpbench: Any
) -> None:
    """`bytes` and counts are those of a mean traced step."""
    one = result_of(fsdpbench, tmp_path / "run", "--batch", "2")
    (config,) = (tmp_path / "run").rglob("config.json")
    record = json.loads(config.read_text())
    record["measurement"]["traced_steps"] = 3
    three = worker_result(in_forks, record, tmp_path / "three")
    assert three["profiler_step_times_s"] == []
    assert three["step_times_s"] == one["measured"]["step_times_s"]
    assert three["memory_traffic"] == one["memory_traffic"]


def worker_result(in_forks: Any, record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record of a configuration that a process of its own runs."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(record))
    script = (
        "import json, sys; from pathlib import Path\n"
        "from fsdpbench.base.configuration.config import Config\n"
        "from fsdpbench.engine.devices.base import Placement\n"
        "from fsdpbench.engine.worker import run_rank\n"
        "config = Config.from_dict(json.loads(Path(sys.argv[1]).read_text()))\n"
        "run_rank(config, Placement(0, 8, 0), Path(sys.argv[2]))"
    )
    (done,) = in_forks(script, [[str(path), str(folder)]])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "trace" / "rank0_record.json").read_text())
    return found
