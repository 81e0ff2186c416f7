"""`plan` and `tune`: nothing varies unasked, nothing is simulated twice or in vain, the best comes first."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.request import SweepRequest, make_request
from fsdpbench.launch.pool import PointPool
from fsdpbench.reports.result import Result
from fsdpbench.sweep import prediction
from fsdpbench.sweep.planning import make_config, without_absent
from fsdpbench.sweep.prediction import as_simulated, cannot_fit, fitting_batches, state_bytes
from fsdpbench.sweep.trials import Trial, simulate, with_room
from fsdpbench.systems import get_system

SIM: dict[str, Any] = {"model": "gpt-tiny", "device": "sim", "gpus": 8}


def request(given: dict[str, Any], **lists: Any) -> SweepRequest:
    return make_request({**SIM, **given}, lists, whole_space=False)


def configuration(model: str, system: str, gpus: int, **settings: Any) -> Config:
    made = request({"model": model, "gpus": gpus})
    return without_absent(make_config(made.target, system, Settings.of(**settings), made.target.workload()))


def test_two_named_axes_of_three_values_are_nine_points() -> None:
    made = request({}, batch=[1, 2, 4], wrap=["block", "every-2", "every-4"])
    assert len(made.plan().points) == 9
    assert made.added_by_preset() is None


def test_a_preset_says_first_what_it_adds() -> None:
    printed = request({}, batch=[4]).added_by_preset() or ""
    assert ", wrap (block, every-4), " in printed
    assert "batch" not in printed.split(";")[0]
    assert "strategy" in (request({"preset": "memory"}, batch=[4, 8]).added_by_preset() or "")


def test_a_named_preset_keeps_its_lists_beside_those_that_are_named() -> None:
    points = request({"preset": "memory"}, batch=[4, 8]).plan().points
    assert {point.settings.strategy for point in points} == {"FULL_SHARD", "SHARD_GRAD_OP"}


@pytest.mark.parametrize(
    ("config", "bytes_each", "shards"),
    [
        (("gpt-175b", "impl-fsdp2", 8), 16, 8),
        (("gpt-6.7b", "torch-ddp", 8), 16, 1),
        (("gpt-13b", "single", 1), 16, 1),
    ],
)
def test_the_training_state_alone_is_enough_to_say_no(
    config: tuple[str, str, int], bytes_each: int, shards: int
) -> None:
    made = configuration(*config)
    parameters = request({"model": config[0]}).target.workload().parameters
    assert state_bytes(made) == bytes_each * parameters // shards
    assert "by arithmetic" in (cannot_fit(made) or "")


def test_sgd_offload_and_hybrid_count_for_what_they_hold() -> None:
    whole = state_bytes(configuration("gpt-2.8b", "impl-fsdp2", 64)) or 0
    assert state_bytes(configuration("gpt-2.8b", "impl-fsdp2", 64, optimizer="sgd")) == whole // 2
    assert state_bytes(configuration("gpt-2.8b", "impl-fsdp2", 64, cpu_offload=True)) is None
    hybrid = configuration("gpt-2.8b", "impl-fsdp2", 64, strategy="HYBRID_SHARD")
    assert (state_bytes(hybrid) or 0) // 8 == whole
    assert state_bytes(configuration("dhen-tiny", "impl-fsdp2", 8)) is None, "tables of their own dtype"


def test_points_are_simulated_once_and_not_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Config] = []

    def run_in(folder: Path, configs: list[Config], *rest: Any) -> list[Trial]:
        ran.extend(configs)
        return [Trial(config, _result(config)) for config in configs]

    monkeypatch.setattr(prediction, "run_in", run_in)
    monkeypatch.setattr(prediction, "_cost_of_a_trace", lambda *ignored: (0.0, 0))
    small = [configuration("gpt-tiny", "impl-fsdp2", 8, batch=batch) for batch in (2, 4, 2)]
    hopeless = configuration("gpt-175b", "impl-fsdp2", 8)
    printed: list[int] = []
    found = prediction.best_first(prediction.forecast([hopeless, *small], 1, printed.append))
    assert [config.settings.batch for config in ran] == [2, 4]
    assert printed == [2]
    assert [each.config.settings.batch for each in found.predictions] == [4, 2, 2, hopeless.settings.batch]
    assert "by arithmetic" in (found.predictions[-1].reason or "")


def _result(config: Config) -> Result:
    batch = config.settings.batch
    return Result.of(
        {
            "status": "ok",
            "cause": None,
            "bench": {"duration_s": 0.1},
            "peak_memory_bytes": {"reserved": batch << 20, "allocated": batch << 20},
            "tokens_per_s_per_gpu": 10.0 * batch,
            "samples_per_s_per_gpu": 1.0 * batch,
            "tflops_per_gpu": 1.0,
            "step_time_s": 0.1,
            "alloc_retries_per_step": 0.0,
        }
    )


DRAWN = {
    "batch": (1, 2),
    "grad_accum": (1, 2),
    "grad_sync": ("every", "last"),
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"),
    "wrap": ("block", "every-2", "root"),
    "param_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("bf16", "fp32"),
    "activation_checkpointing": ("none", "full"),
    "optimizer": ("adamw", "adamw-foreach", "sgd"),
    "zero_grad": ("release", "fill"),
    "backward_prefetch": ("pre", "post", "none"),
}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "system", ["impl-fsdp2", "impl-fsdp1", "torch-fsdp2", "torch-fsdp1", "torch-ddp", "single"]
)
def test_what_fits_is_never_ruled_out(system: str) -> None:
    """The bound is below what a simulated step holds at its peak, with settings drawn by seed."""
    draw = random.Random(7)
    configs: list[Config] = []
    while len(configs) < 12:
        settings = {name: draw.choice(values) for name, values in DRAWN.items()}
        with contextlib.suppress(UsageError):
            made = configuration("gpt-125m", system, 1 if system == "single" else 16, **settings)
            if not get_system(system).not_applicable(made):
                configs.append(made)
    probes = [with_room(as_simulated(config) or config) for config in configs]
    trials = simulate(probes, 1, lambda done: None)
    # torch's FSDP1 refuses some dtypes with NO_SHARD; what does not train holds nothing.
    ran = [(config, trial) for config, trial in zip(configs, trials, strict=True) if trial.fits]
    assert len(ran) >= 8
    for config, trial in ran:
        assert (state_bytes(config) or 0) <= (trial.allocated or 0), config.name


def test_progress_is_told_in_lines_where_it_goes_to_a_file(fsdpbench: Any) -> None:
    done = fsdpbench("plan", "--model", "gpt-tiny", "--gpus", "8", "--device", "sim", "--batch", "1,2")
    assert done.returncode == 0
    assert "2 points to simulate" in done.stderr
    assert "simulated 1 of 2, about" in done.stderr
    assert "simulated 2 of 2" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("1", "2"))]
    assert rows[0][1] == "2", "the faster one comes first"


def test_batches_once_found_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their content key: under other settings of the allocator they are simulated again."""
    space = request({}, activation_checkpointing=["none"]).space
    kept, said = tmp_path / ".batches", list[str]()
    first = fitting_batches(space, 2, said.append, kept)

    def start(*_: object) -> None:
        raise AssertionError("something is simulated")

    monkeypatch.setattr(PointPool, "start", start)
    assert fitting_batches(space, 2, said.append, kept) == first
    assert said[0] == said[1]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(AssertionError, match="something is simulated"):
        fitting_batches(space, 2, said.append, kept)
