"""Nodes as they are stated: `h100-80gb+node-4+nic-50` has 50 GB/s a node of 4 GPUs."""

from __future__ import annotations

import itertools

import pytest

from fsdpbench.sim.model.network import KINDS, Network
from fsdpbench.sim.model.profile import (
    ProfileError,
    load_profile,
    parse_profile,
    profile_layers,
    profile_names,
    stated_machine,
)

GB = 10**9


def gathered(hardware: str, ranks: int, per_node: int | None = None) -> float:
    """Bytes a second that leave a node in a large all-gather, as its ring is."""
    profile = load_profile(hardware)
    network = Network(profile, ranks, per_node or profile.gpus_per_node)
    size = 64 * GB
    return size * (ranks - 1) / ranks / network.collective_ns("all_gather", size, range(ranks))


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_what_is_stated_of_a_node_is_the_nodes(gpus: int) -> None:
    name = stated_machine("h100-80gb", gpus, 40.0)
    assert load_profile(name).gpus_per_node == gpus
    assert gathered(name, 4 * gpus) == pytest.approx(0.98 * 40, rel=0.01)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_nics_stay_with_their_gpus(gpus: int) -> None:
    name = stated_machine("h100-80gb", gpus, None)
    assert load_profile(name).nic.gb_s_per_node == 50 * gpus
    assert gathered(name, 4 * gpus) == pytest.approx(0.98 * 50 * gpus, rel=0.01)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_node_of_four_is_half_of_one_of_eight(kind: str) -> None:
    halves, used = Network(load_profile("h100-80gb+node-4"), 16, 4), Network(load_profile("h100-80gb"), 16, 4)
    for size, ranks in itertools.product((1024, GB), (range(8), range(16), range(0, 16, 4))):
        assert halves.collective_ns(kind, size, ranks) == used.collective_ns(kind, size, ranks)


def test_fewer_gpus_than_a_node_has_use_their_rails() -> None:
    assert gathered("h100-80gb+nic-40", 16, 4) == pytest.approx(0.98 * 20, rel=0.01)
    assert (
        load_profile("h100-80gb+nic-40").node_words(4) == "40 GB/s a node of 8 GPUs, 4 of them used (20 GB/s)"
    )
    assert load_profile("h100-80gb+node-1").node_words() == "50 GB/s a node of 1 GPU"


def test_the_name_says_what_is_stated_and_no_more() -> None:
    assert stated_machine("h100-80gb", 8) == "h100-80gb"
    assert stated_machine("gb200", 4) == "gb200"
    assert stated_machine("gb200", 72) == "gb200+node-72"
    assert stated_machine("h100-80gb+nic-50", 4) == stated_machine("h100-80gb+node-4", None, 50.0)
    assert stated_machine("h100-80gb+node-4+nic-50", 4, 50.0) == "h100-80gb+node-4+nic-50"
    exact = 100 / 3
    assert load_profile(stated_machine("h100-80gb", None, exact)).nic.gb_s_per_node == exact
    assert load_profile("gb200+node-72").nic.gb_s_per_node == 18 * 200
    assert profile_layers("h100-80gb+node-4")[0] == ("h100-80gb+node-4", {"gpus_per_node"})
    assert profile_layers("h100-80gb+node-4+nic-50")[0][1] == {"gpus_per_node", "nic"}


@pytest.mark.parametrize(
    ("name", "gpus", "nic", "why"),
    [
        ("h100-80gb+node-4", 8, None, "says 4, and --gpus-per-node 8"),
        ("h100-80gb+nic-50", None, 60.0, "says 50, and --nic-gb-s 60"),
        ("h100-80gb", 0, None, "gpus_per_node = 0"),
        ("h100-80gb", None, 0.0, "nic.gb_s_per_node = 0"),
        ("h100-80gb+node-0", None, None, "gpus_per_node = 0"),
        ("h100-80gb+nic-1e400", None, None, "1e400"),
        ("h100-80gb+nic-1..2", None, None, "is not a number of GB/s"),
        ("h100-80gb+node-x", None, None, "unknown hardware"),
        ("h100+node-4", None, None, "did you mean"),
    ],
)
def test_contradictions_and_nonsense_are_named(name: str, gpus: int, nic: float, why: str) -> None:
    with pytest.raises(ProfileError) as caught:
        stated_machine(name, gpus, nic)
    assert why in str(caught.value)


def test_a_file_that_states_another_node_has_its_share_of_the_network() -> None:
    mine = parse_profile('base = "h100-80gb"\nname = "mine"\ngpus_per_node = 4\n', "mine.toml")
    assert (mine.gpus_per_node, mine.nic.gb_s_per_node) == (4, 200)
    stated = 'base = "h100-80gb"\nname = "mine"\ngpus_per_node = 4\n[nic]\ngb_s_per_node = 100\n'
    assert parse_profile(stated, "mine.toml").nic.gb_s_per_node == 100


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_can_have_other_nodes(name: str) -> None:
    whole = load_profile(name)
    half = load_profile(f"{name}+node-{whole.gpus_per_node // 2}")
    assert half.nic.gb_s_per_node == whole.nic.gb_s_per_node / 2
    assert half.nvlink == whole.nvlink
