"""What no machine can do, no simulated one does: random models, machines and settings.

A run is held against its chip and links. Beside it a run that differs in one thing: a machine better in one
part is not slower, more work takes no less time and memory, more GPUs hold no more each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import UsageError
from fsdpbench.engine.results.records import Status
from fsdpbench.launch.pool import PointPool
from fsdpbench.sim.model.profile import load_profile, profile_names
from fsdpbench.sweep.planning import configured, make_target, not_applicable
from fsdpbench.sweep.trials import Trial, run

SLACK = 1.005
"""Of a step: what is queued in another order may wait differently (Graham's anomalies)."""
BETTER: dict[str, dict[str, tuple[str, float]]] = {
    "network": {"nic": ("gb_s_per_node", 2.0)},
    "latency": {"nic": ("base_us", 0.5)},
    "host link": {"host_link": ("gb_s", 1.5)},
    "capacity": {"memory": ("capacity_gib", 1.5)},
    "bandwidth": {"memory": ("bandwidth_gb_s", 1.3)},
    "launches": {"cpu": ("launch_us", 0.5)},
    "contention": {"contention": ("compute_slowdown", 0.9)},
}
MORE = ("batch", "seq", "grad_accum", "layers", "vocab", "d_ff")
MODELS = {"gpt": "gpt-125m", "llama": "llama2-7b", "decoder": "qwen3-8b", "mixture": "mixtral-8x7b"}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "strategy": ("SHARD_GRAD_OP", "HYBRID_SHARD"), "wrap": ("every-2", "root"),
    "backward_prefetch": ("none",), "compile": (True,), "activation_offload": (True,),
    "linear_dtype": ("fp8",), "param_dtype": ("fp32",),
    "optimizer": ("adamw-foreach", "sgd"), "tp": (2,), "cp": (2,), "ep": (2,), "loss": ("fused",),
    "reduce_dtype": ("bf16",), "clip": (1.0,), "lora": (8,),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A configuration as a user states it."""

    hardware: str
    model: str
    shape: Mapping[str, int]
    gpus: int
    system: str
    settings: Mapping[str, Any]

    def config(self) -> Config:
        """Return its configuration. Raises `UsageError` for what cannot run."""
        target = make_target(
            model=self.model, shape=dict(self.shape), data=None, device="sim", hardware=self.hardware,
            gpus=self.gpus, measurement=Measurement.default_for("sim"),
        )  # fmt: skip
        config = configured(target, self.system, **self.settings)
        if refused := not_applicable(config, self.settings):
            raise UsageError(str(refused))
        return config


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    kind, width = draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from([1024, 2048, 4096]))
    heads = width // draw(st.sampled_from([64, 128]))
    shape = {"layers": draw(st.integers(1, 4)), "d_model": width, "heads": heads}
    shape |= {"vocab": draw(st.sampled_from([32000, 128256])), "max_seq": 16384}
    if kind != "gpt":
        shape |= {"kv_heads": draw(st.sampled_from([heads, heads // 4]))}
        shape |= {"experts": 8, "expert_d_ff": 2 * width} if kind == "mixture" else {"d_ff": 3 * width}
    names = draw(st.sets(st.sampled_from(sorted(SETTINGS)), max_size=3))
    chosen = {name: draw(st.sampled_from(SETTINGS[name])) for name in sorted(names)}
    chosen |= {"batch": draw(st.integers(1, 4)), "seq": draw(st.sampled_from([512, 2048, 4096]))}
    chosen |= {"activation_checkpointing": draw(st.sampled_from(["none", "op", "full"]))}
    gpus = draw(st.sampled_from([1, 2, 8, 16, 64, 512, 2048]))
    systems = (
        ["single"] if gpus == 1 else ["torch-fsdp2", "torch-fsdp1", "impl-fsdp2", "impl-fsdp1", "torch-ddp"]
    )
    return Cell(
        draw(st.sampled_from(profile_names())),
        MODELS[kind],
        shape,
        gpus,
        draw(st.sampled_from(systems)),
        chosen,
    )


def better(cell: Cell, part: str, folder: Path) -> Cell:
    """Return the cell on a machine that is better in one part."""
    profile = load_profile(cell.hardware)
    text = f'name = "better"\nbase = "{cell.hardware}"\n'
    for section, (key, factor) in BETTER[part].items():
        value = max(1.0, getattr(getattr(profile, section), key) * factor)
        text += f"[{section}]\n{key} = {value!r}\n"
    path = folder / f"{cell.hardware}-{part.replace(' ', '-')}.toml"
    path.write_text(text)
    return replace(cell, hardware=str(path))


def more(cell: Cell, what: str) -> Cell:
    """Return the cell with twice as much work in one respect; one more layer."""
    if what in ("batch", "seq", "grad_accum"):
        return replace(cell, settings={**cell.settings, what: 2 * cell.settings.get(what, 1)})
    return replace(
        cell, shape={**cell.shape, what: cell.shape[what] + (1 if what == "layers" else cell.shape[what])}
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[PointPool]:
    with PointPool(2) as pool:
        yield pool


def simulated(pool: PointPool, *configs: Config) -> list[Trial]:
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(tempfile.mkdtemp(dir=folder)) for _ in configs]
        found = {trial.folder: trial for trial in run(zip(configs, places, strict=True), pool)}
        return [found[place] for place in places]


def check_alone(trial: Trial) -> None:
    """Hold a run against its chip and links."""
    result, chip = trial.result, load_profile(trial.config.hardware or "")
    assert trial.status in (Status.OK, Status.OOM), trial.cause
    if trial.status is Status.OOM:
        return
    peaks, interval = result.peak_memory_bytes, trial.interval
    assert peaks is not None
    assert interval is not None
    assert (peaks.allocated or 0) <= (peaks.active or 0) <= (peaks.reserved or 0) <= chip.usable_memory_bytes
    if trial.config.settings.linear_dtype == "bf16":
        assert (result.hfu or 0.0) <= 1.0
    shares = [each.roof_share or 0.0 for each in (result.communication or {}).values()]
    # NVLink's switch reduces: an all-reduce then carries less than a ring would.
    assert all(share <= 1.1 for share in shares), shares
    low, high = interval["step_time_s"]
    assert low < (result.step_time_s or 0.0) < high


@pytest.mark.campaign
@pytest.mark.parametrize("change", [*BETTER, *MORE, "gpus"])
@settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(cell=cells())
def test_nothing_is_faster_than_physics_and_nothing_gains_from_less(
    pool: PointPool, cell: Cell, change: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            if change == "gpus":
                other = replace(cell, gpus=2 * cell.gpus)
            else:
                assume(change in BETTER or change in cell.shape or change in ("batch", "seq", "grad_accum"))
                other = better(cell, change, Path(folder)) if change in BETTER else more(cell, change)
            configs = cell.config(), other.config()
        except UsageError:
            assume(False)
        trials = simulated(pool, *configs)
        for trial in trials:
            check_alone(trial)
    less, most = trials if change not in BETTER else trials[::-1]
    assert not (
        less.status is Status.OOM and most.status is Status.OK and change not in ("gpus", "grad_accum")
    )
    if not (less.fits and most.fits) or less.retries or most.retries:
        return
    if change == "gpus":
        assert (most.allocated or 0) <= 1.001 * (less.allocated or 0) + (1 << 20)
        return
    assert (less.step_time_s or 0.0) <= SLACK * (most.step_time_s or 0.0)
    assert change in (*BETTER, "grad_accum") or (less.allocated or 0) <= (most.allocated or 0)
