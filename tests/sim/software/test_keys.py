"""Each key of a profile, by itself, changes what is simulated: none is read and forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.sim.model.software import SoftwareProfile

VALUES: dict[str, Any] = {
    "collectives.own_streams": "true",
    "attention.forward_rate": "0.001",
    "attention.backward_rate": "0.001",
    "attention.unpads": "true",
    "kernels.older": "true",
    "checkpointing.reentrant": "true",
    "checkpointing.by_operator": "false",
    "operators.composed_rms_norm": "true",
    "operators.fused_rotary": "true",
    "fsdp1.use_orig_params": "false",
    "fsdp1.copies_gradients": "true",
    "fsdp1.limits_prefetched_units": "true",
    "fsdp1.views_on_compute_stream": "true",
    "trainer.fused_loss": "true",
    "trainer.keeps_outputs": "true",
    "trainer.metrics": "3",
    "trainer.host_us": "500",
    "llama.norms": '"composed"',
    "llama.rotary": '"matrices"',
    "llama.repeat_kv": "true",
    "llama.fp32_loss": "false",
}
REFUSES = {"checkpointing.by_operator"}
# Of two kinds in the plain suite: one that is read where it counts, one that changes torch's code.
PLAIN = {"collectives.own_streams", "fsdp1.views_on_compute_stream"}


def test_these_are_all_keys() -> None:
    profile = SoftwareProfile("n", "t", "s")
    assert [key for key, _, _ in profile._values()] == list(VALUES)


@pytest.mark.simulated
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[] if key in PLAIN else pytest.mark.campaign)
        for key in sorted(VALUES.keys() - REFUSES)
    ],
)
def test_a_key_alone_changes_the_figures(key: str, tmp_path: Path) -> None:
    from simulated_runs import run, run_in_fork

    path = tmp_path / "mine.toml"
    section, _, name = key.partition(".")
    kept = "keeps_outputs = true\n" if key == "trainer.metrics" else ""
    path.write_text(
        f'name = "mine"\ntitle = "t"\nsource = "s"\n[sources]\n{section} = "s"\n'
        f"[{section}]\n{kept}{name} = {VALUES[key]}\n"
    )
    # The limiter has something to wait for where the device is behind the CPU.
    models = {
        "operators.composed_rms_norm": "llama-tiny",
        "fsdp1.limits_prefetched_units": "gpt-125m",
        "fsdp1.views_on_compute_stream": "gpt-125m",
    }
    of_llamas = key.startswith("llama.") or key == "operators.fused_rotary"
    model = "llama-tiny" if of_llamas else models.get(key, "gpt-tiny")
    settings: dict[str, Any] = {"model": model, "activation_checkpointing": "full", "batch": 4}
    if key == "kernels.older":
        # It has two generations of them, and a tiny model waits for the CPU there.
        settings |= {"hardware": "h100-80gb", "model": "gpt-1.3b"}
    plain, changed = run_in_fork("torch-fsdp1", **settings), run("torch-fsdp1", str(path), **settings)
    figures = ("step_times_s", "memory_per_step", "flops_per_step")
    assert [changed[name] for name in figures] != [plain[name] for name in figures]
