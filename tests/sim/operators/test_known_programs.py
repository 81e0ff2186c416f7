"""What programs read from the simulated device is the CPU's value, refused, or reported as unknown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from known_programs import Reports

pytestmark = pytest.mark.simulated

FORGOTTEN = {
    "factories": [
        "torch.arange(12).view(3, 4).t().to(D)",
        "torch.randint(0, 9, {shape}, device=D)",
        "torch.randint_like({a}, 5)",
        "torch.randperm({size}, device=D)",
    ],
    "results": [
        "torch.block_diag({a}, {b})",
        "torch.vander({a})",
        "{a}.cummax({dim})[0]",
        "{a}.cummax({dim})[1]",
        "{a}.float().ceil().long()",
        "{a}.float().isinf()",
        "{a}.mode()[0]",
        "{a}.nansum()",
    ],
    "effects": [
        "torch._foreach_add_([{a}, {b}], 1)",
        "torch._foreach_add_([{a}], [{b}])",
        "torch._foreach_copy_([{a}], [{b}])",
        "torch._foreach_mul_([{a}, {b}], 2)",
        "torch._foreach_mul_([{a}], {b}.max())",
        "torch._foreach_sub_([{a}], 1)",
        "torch._foreach_zero_([{a}, {b}])",
        "{a}.bernoulli_(0.5)",
        "{a}.geometric_(0.5)",
        "{a}.random_(0, 5)",
    ],
}
"""Lines whose results are unknown on the device although they are whole numbers of whole numbers."""
if torch.__version__ >= "2.14":
    FORGOTTEN["results"].append("torch.combinations({a})")


def started() -> Reports:
    import torch
    from known_programs import RANKS, Reports

    from fsdpbench.sim import Simulation
    from fsdpbench.sim.model.profile import load_profile

    torch.set_num_threads(1)
    simulation = Simulation.start(load_profile("a100-80gb"), RANKS, RANKS)
    simulation.init_process_group()
    return Reports(simulation.accelerator)


def drawn(seeds: range, *, groups: bool) -> Counter[str]:
    """Run the programs of all seeds; return how many values were equal, unknown, refused, ..."""
    from known_programs import search

    reports, counts = started(), Counter[str]()
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


@pytest.mark.parametrize("kind", ["factories", "results", "effects"])
def test_whole_numbers_are_forgotten_only_by_these_lines(kind: str) -> None:
    from known_programs import forgotten

    assert sorted(forgotten(kind, started())) == sorted(FORGOTTEN[kind])
