"""Collectives inside and between nodes."""

from __future__ import annotations

import dataclasses
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.sim.model.network import KINDS, Network
from fsdpbench.sim.model.profile import load_profile

A100, H100 = load_profile("a100-80gb"), load_profile("h100-80gb")
GB = 10**9


@pytest.mark.parametrize(("name", "gpu"), [("a100-80gb", "A100"), ("h100-80gb", "H100"), ("h200", "H200")])
def test_collectives_in_a_node_meet_the_measured_table(measured_table, name, gpu):
    network = Network(load_profile(name), 8, 8)
    errors: dict[int, list[float]] = {2: [], 4: [], 8: []}
    for row in measured_table("nccl_intranode_tables.csv"):
        if row["gpu"] == gpu:
            ranks = int(row["N"])
            predicted = network.collective_ns(row["op"], int(row["bytes"]), range(ranks)) / 1e3
            errors[ranks].append(abs(predicted / float(row["us"]) - 1))
    assert mean(errors[8]) < 0.06
    assert mean(errors[2] + errors[4]) < 0.12


@pytest.mark.parametrize(
    ("nodes", "latency_us", "gb_s"), [(2, 70, 410), (4, 146, 396), (8, 297, 390), (16, 599, 387)]
)
def test_rings_between_h100_nodes_meet_published_fits(nodes, latency_us, gb_s):
    network = Network(H100, 8 * nodes, 8)
    ranks, size = range(8 * nodes), 4 * GB
    wire = size * (1 - 1 / len(ranks))
    published_ns = latency_us * 1e3 + wire / gb_s
    assert network.collective_ns("all_gather", size, ranks) == pytest.approx(published_ns, rel=0.06)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_large_rings_between_nodes_have_the_latency_of_simple(kind):
    nodes, size = 256, 405_000_000  # a block of Llama-7B in bf16
    ranks = range(8 * nodes)
    hops_us = 7 * nodes * 3.4 + nodes * 14.0 * (1 + 0.15 * 4)  # four doublings beyond 16 nodes
    wire_us = size * (1 - 1 / len(ranks)) / (0.98 * 400e9) * 1e6
    found_us = Network(H100, 8 * nodes, 8).collective_ns(kind, size, ranks) / 1e3
    assert found_us == pytest.approx(hops_us + wire_us, rel=0.01)


def test_hops_grow_beyond_sixteen_nodes_alone():
    assert [H100.nic.hop_factor(nodes) for nodes in (1, 2, 16)] == [1, 1, 1]
    assert H100.nic.hop_factor(64) == pytest.approx(1.3)
    flat = dataclasses.replace(H100, nic=dataclasses.replace(H100.nic, hop_growth=0.0))
    for kind in ("all_gather", "all_reduce"):
        for nodes, longer in ((16, False), (64, True)):
            times = [
                Network(profile, 512, 8).collective_ns(kind, 1024, range(8 * nodes))
                for profile in (flat, H100)
            ]
            assert (times[1] > times[0]) is longer


def test_a_protocol_carries_no_more_than_its_most():
    low_latency, _, simple = H100.nic.protocols
    assert low_latency.carries(10e9) == 2.5e9
    assert low_latency.carries(400e9) == 20e9
    assert simple.carries(400e9) == 400e9


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(set(KINDS) - {"barrier"})),
    size=st.integers(1, 4 * GB),
    nodes=st.sampled_from([1, 2, 4, 16, 64]),
)
def test_more_bytes_take_no_less(kind, size, nodes):
    network = Network(A100, 512, 8)
    ranks = range(8 * nodes)
    assert network.collective_ns(kind, 2 * size, ranks) >= network.collective_ns(kind, size, ranks)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "barrier"])
def test_latency_grows_with_the_nodes(kind):
    network = Network(A100, 512, 8)
    times = [network.collective_ns(kind, 1024, range(8 * nodes)) for nodes in (1, 2, 4, 8, 16, 32, 64)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_the_tree_makes_small_all_reduces_grow_with_the_logarithm():
    network = Network(A100, 512, 8)
    few, many = (network.collective_ns("all_reduce", 1024, range(8 * nodes)) for nodes in (8, 64))
    assert many < 2 * few


def test_an_all_reduce_moves_what_gather_and_scatter_move_together():
    network = Network(A100, 64, 8)
    ranks, size = range(64), 2 * GB
    both = network.collective_ns("all_gather", size, ranks) + network.collective_ns(
        "reduce_scatter", size, ranks
    )
    assert network.collective_ns("all_reduce", size, ranks) == pytest.approx(both, rel=0.15)


# Bus bandwidths published of 16 GPUs on two nodes, GB/s by MiB (docs/validation.md).
TWO_NODES = [
    ("h100-80gb+nic-400", {256: 343, 1024: 437, 4096: 466, 16384: 487}, 0.1),
    ("a100-80gb+nic-50", {256: 70, 1024: 77}, 0.28),
]


@pytest.mark.parametrize(("hardware", "published", "within"), TWO_NODES)
def test_all_reduces_of_two_nodes_are_as_published(hardware, published, within):
    network = Network(load_profile(hardware), 16, 8)
    for mib, bandwidth in published.items():
        seconds = network.collective_ns("all_reduce", mib << 20, range(16)) * 1e-9
        assert 2 * 15 / 16 * (mib << 20) / seconds / 1e9 == pytest.approx(bandwidth, rel=within)


def test_one_rank_a_node_has_one_rail():
    network = Network(A100, 64, 8)
    across = network.collective_ns("all_reduce", GB, range(0, 64, 8))
    everyone = network.collective_ns("all_reduce", GB, range(64))
    assert 6 < across / everyone < 9


def test_ranks_may_be_any_sequence():
    network = Network(A100, 64, 8)
    for ranks in (range(64), range(0, 64, 8), range(8, 16), range(1, 64, 2)):
        expected = network.collective_ns("all_gather", GB, ranks)
        assert network.collective_ns("all_gather", GB, tuple(ranks)) == expected


def test_a_group_inside_a_node_does_not_use_the_network():
    small, large = Network(A100, 8, 8), Network(A100, 512, 8)
    assert small.collective_ns("all_gather", GB, range(8)) == large.collective_ns(
        "all_gather", GB, range(8, 16)
    )


def test_two_nodes_of_four_use_half_of_the_nics():
    halves, whole = Network(A100, 8, 4), Network(A100, 16, 8)
    ratio = halves.collective_ns("all_gather", 4 * GB, range(8)) / whole.collective_ns(
        "all_gather", 4 * GB, range(16)
    )
    assert 1.7 < ratio < 2.1


def test_alone_it_is_a_copy():
    assert Network(A100, 1, 8).collective_ns("all_gather", 0, (0,)) < 10_000


def test_a_range_of_many_ranks_is_not_walked():
    network = Network(A100, 10**9, 8)
    assert network.collective_ns("all_gather", GB, range(10**9)) > 0


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="known are all_gather"):
        Network(A100, 8, 8).collective_ns("gossip", 1, range(8))
    with pytest.raises(ValueError, match="at least one rank"):
        Network(A100, 8, 8).collective_ns("all_gather", 1, ())
    with pytest.raises(ValueError, match="must be at least 1"):
        Network(A100, 0, 8)
