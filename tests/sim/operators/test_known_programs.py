"""What programs read from the simulated device is the CPU's value, refused, or reported as unknown."""

from __future__ import annotations

from collections import Counter

import pytest

pytestmark = pytest.mark.simulated


def drawn(seeds: range, *, groups: bool) -> Counter[str]:
    """Run the programs of all seeds; return how many values were equal, unknown, refused, ..."""
    import torch
    from known_programs import RANKS, Reports, search

    from fsdpbench.sim import Simulation
    from fsdpbench.sim.model.profile import load_profile

    torch.set_num_threads(1)
    simulation = Simulation.start(load_profile("a100-80gb"), RANKS, RANKS)
    simulation.init_process_group()
    reports, counts = Reports(simulation.accelerator), Counter[str]()
    for seed in seeds:
        pair, finding = search(seed, reports, groups=groups)
        counts += pair.counts
        assert finding is None, f"seed {seed}: {finding}"
    return counts


def test_no_value_is_silently_wrong() -> None:
    counts = drawn(range(60), groups=True)
    assert counts["equal"] > counts["unknown"] / 4, "hardly any value is known"
    assert counts["reported"], "no program has an assumed length"


@pytest.mark.campaign
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("part", range(16))
def test_no_value_of_many_programs_is_silently_wrong(part: int, groups: bool) -> None:
    assert drawn(range(1000 + part * 250, 1250 + part * 250), groups=groups)["equal"] > 500
