"""A profile fitted to a simulated trace repeats the traced machine's steps with other settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdpbench.sim.model.profile import HardwareProfile

pytestmark = pytest.mark.simulated


def step_ns(profile: HardwareProfile, batch: int, length: int, trace: Path | None = None) -> int:
    """Time of a third step of a small GPT on one simulated GPU; written to `trace`."""
    from device_training import TinyGPT

    from fsdpbench.sim import Simulation

    sim = Simulation.start(profile, 1, 1)
    model = TinyGPT(1024, 2).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> int:
        sim.synchronize()
        start = sim.cpu_ns()
        tokens = torch.zeros(batch, length, dtype=torch.int64, device="sim")
        with torch.autocast("sim", torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sim.synchronize()
        return sim.cpu_ns() - start

    step(), step()
    if trace is None:
        return step()
    with sim.trace(trace) as tracer:
        found = step()
        tracer.step()
    return found


def test_other_settings_are_simulated_as_on_the_traced_machine(tmp_path: Path) -> None:
    from fsdpbench.base.files.documents import to_toml
    from fsdpbench.lab.calibrate.from_trace import fit_trace, read_samples
    from fsdpbench.sim.model.profile import load_profile, parse_profile

    truth, base = load_profile("h200"), load_profile("h100-80gb")
    step_ns(truth, 16, 1024, tmp_path / "trace.json.gz")
    found, figures, _ = fit_trace(read_samples([tmp_path]), "h100-80gb", "mine", "a test")
    mine = parse_profile(to_toml(found.to_toml_tables()), "mine")
    assert sum(not each.stays for each in figures) > 8
    wanted = step_ns(truth, 64, 512)
    assert step_ns(mine, 64, 512) == pytest.approx(wanted, rel=0.03)
    assert step_ns(base, 64, 512) != pytest.approx(wanted, rel=0.05)
