"""`calibrate --nccl-tests`: tables of every version are read, and the network behind them is found again."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.commands.calibrate import command
from fsdpbench.lab.calibrate.nccl_tests import KINDS, Point, points_of_files
from fsdpbench.lab.calibrate.network_fit import fit_network
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import HardwareProfile, load_profile

PROGRAMS = {
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_reduce": "all_reduce_perf",
    "all_to_all": "alltoall_perf",
}
SIZES = tuple(1 << power for power in range(16, 33))


def cluster(gb_s: float = 15.0, hop: float = 2.5, call: float = 33.0, per_node: int = 4) -> HardwareProfile:
    """Return an H100 machine whose network differs from the packaged one."""
    base = load_profile("h100-80gb")
    protocols = tuple(
        dataclasses.replace(each, nic_hop_us=each.nic_hop_us * hop) for each in base.nic.protocols
    )
    nic = dataclasses.replace(base.nic, gb_s_per_node=gb_s, efficiency=1.0, base_us=call, protocols=protocols)
    return dataclasses.replace(base, nic=nic, gpus_per_node=per_node)


def printed(
    profile: HardwareProfile,
    kind: str,
    nodes: int,
    *,
    sizes: Sequence[int] = SIZES,
    old: bool = False,
    prefix: str = "",
    noise: Callable[[], float] = lambda: 1.0,
) -> str:
    """Return what nccl-tests would print of `kind` on a simulated cluster; `old`: before version 2.17."""
    per_node = profile.gpus_per_node
    ranks = nodes * per_node
    network = Network(profile, ranks, per_node)
    lines = [] if old else [f"# Collective test starting: {PROGRAMS[kind]}"]
    lines += ["# nThread 1 nGpus 1 minBytes 8 maxBytes 4294967296 step: 2(factor) warmup iters: 5", "#"]
    group = "" if old else "Group  0 "
    lines += [
        f"#  Rank {rank:2d} {group}Pid {1000 + rank:6d} on n-{rank // per_node} device {rank % per_node}"
        for rank in range(ranks)
    ]
    lines += ["#                                        out-of-place                       in-place"]
    columns = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    lines += [f"#   {columns}", "#    (B)    (elements)    (us)  (GB/s)  (GB/s)    (us)  (GB/s)  (GB/s)"]
    share = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    for size in sizes:
        us = network.collective_ns(kind, size, range(ranks)) / 1e3 * noise()
        rate = size / us / 1e3
        triple = f"{us:8.2f} {rate:8.4f} {rate * share:8.4f} 0"
        second = "N/A N/A N/A N/A" if kind == "all_to_all" else triple
        reduction = "sum" if "reduce" in kind else "none"
        lines.append(f"{size:12d} {size // 4:12d} float {reduction} -1 {triple} {second}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0"]
    return "".join(f"{prefix}{line}\n" for line in lines)


def read(tmp_path: Path, *texts: str) -> list[Point]:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(text)
    return points_of_files(paths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:", "0: "])
def test_every_version_and_launcher_is_read(kind: str, old: bool, prefix: str, tmp_path: Path) -> None:
    points = read(tmp_path, printed(cluster(), kind, 2, old=old, prefix=prefix))
    assert [point.nbytes for point in points] == list(SIZES)
    assert {(point.kind, point.ranks, point.nodes) for point in points} == {(kind, 8, 2)}
    network = Network(cluster(), 8, 4)
    for point in points:
        simulated = network.collective_ns(kind, point.nbytes, range(8)) / 1e3
        assert point.us == pytest.approx(simulated, rel=1e-3, abs=0.01)


def test_several_tables_in_one_file(tmp_path: Path) -> None:
    both = printed(cluster(), "all_gather", 2) + printed(cluster(), "all_reduce", 4)
    found = {(point.kind, point.nodes) for point in read(tmp_path, both)}
    assert found == {("all_gather", 2), ("all_reduce", 4)}


def test_the_report_in_json(tmp_path: Path) -> None:
    report = {
        "version": "2.17",
        "args": ["./build/all_reduce_perf", "-b", "1M"],
        "devices": [{"rank": rank, "hostname": f"n{rank // 2}", "pid": 1} for rank in range(4)],
        "results": [
            {
                "size": 1 << 20,
                "redop": "sum",
                "root": -1,
                "out_of_place": {"time": 80.5, "alg_bw": 13.0, "bus_bw": 19.5},
            }
        ],
    }
    path = tmp_path / "out.json"
    path.write_text(json.dumps(report))
    assert points_of_files([path]) == [Point("all_reduce", 1 << 20, 80.5, 4, 2)]


def test_the_network_is_found_again(tmp_path: Path) -> None:
    truth, random_ = cluster(), random.Random(1)
    texts = [
        printed(truth, kind, nodes, noise=lambda: math.exp(random_.gauss(0, 0.03)))
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
        for nodes in (2, 16)
    ]
    found = fit_network(read(tmp_path, *texts), load_profile("h100-80gb"))
    assert found.profile.nic.gb_s_per_node == pytest.approx(15.0, rel=0.05)
    assert found.mean_error < 0.05
    # Also where nothing was measured: other sizes, and four times as many nodes.
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for nbytes in (3 << 20, 300 << 20):
            for ranks in (32, 256):
                fitted, real = (
                    Network(profile, ranks, 4).collective_ns(kind, nbytes, range(ranks))
                    for profile in (found.profile, truth)
                )
                assert fitted == pytest.approx(real, rel=0.1)


@settings(max_examples=4, deadline=None)
@example(
    gb_s=2.0, hop=2.25, call=7.0, per_node=1, nodes=[3]
)  # a step of the search left the range of profiles
@given(
    gb_s=st.floats(2.0, 400.0),
    hop=st.floats(0.3, 5.0),
    call=st.floats(5.0, 100.0),
    per_node=st.sampled_from([1, 2, 4, 8]),
    nodes=st.lists(st.sampled_from([2, 3, 8, 32]), min_size=1, max_size=2, unique=True),
)
def test_any_network_of_this_kind_is_found(
    gb_s: float, hop: float, call: float, per_node: int, nodes: list[int]
) -> None:
    truth = cluster(gb_s, hop, call, per_node)
    points = [
        Point(
            kind,
            size,
            Network(truth, n * per_node, per_node).collective_ns(kind, size, range(n * per_node)) / 1e3,
            n * per_node,
            n,
        )
        for n in nodes
        for kind in ("all_gather", "all_reduce")
        for size in SIZES
    ]
    # With one number of nodes a hop and a call have one factor, which can be far from both.
    least = 0.12 if len(nodes) > 1 else 0.25
    assert fit_network(points, load_profile("h100-80gb")).mean_error < least


def test_sizes_that_show_no_latency_leave_the_base_s(tmp_path: Path) -> None:
    large = printed(cluster(), "all_gather", 2, sizes=[1 << 31, 1 << 32])
    found = fit_network(read(tmp_path, large), load_profile("h100-80gb"))
    assert found.fitted == ("bandwidth",)
    assert "latency" in found.kept
    assert found.profile.nic.protocols == load_profile("h100-80gb").nic.protocols


def test_the_command_writes_a_profile_that_simulates_the_measured_times(tmp_path: Path) -> None:
    files = []
    for kind, nodes in (("all_gather", 2), ("all_reduce", 4), ("all_gather", 1)):
        files.append(tmp_path / f"{kind}-{nodes}.txt")
        files[-1].write_text(printed(cluster(), kind, nodes))
    output = tmp_path / "mine.toml"
    arguments = [word for file in files for word in ("--nccl-tests", str(file))]
    done = CliRunner().invoke(command, [*arguments, "--base", "h100-80gb", "-o", str(output), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["gb_s_per_node"] == pytest.approx(15.0, rel=0.1)
    assert record["sizes"] == {"between_nodes": 34, "inside_a_node": 17}
    mine = load_profile(output)
    for ranks in (4, 8):
        made, true = (
            Network(profile, ranks, 4).collective_ns("all_gather", 1 << 28, range(ranks))
            for profile in (mine, cluster())
        )
        assert made == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no table of nccl-tests"),
        ("{}", "is not a report of nccl-tests"),
        ('{"results": [{"size": 1, "out_of_place": {"time": 1.0}}]}', "no line says which ranks"),
        ("# size time algbw busbw\n1024 1.0 1.0 1.0\n", "no line says which ranks"),
        (printed(cluster(), "all_gather", 2).replace("Group  0", "Group  1", 1), "2 groups of ranks"),
        (printed(cluster(), "all_gather", 2).replace("n-1", "n-0", 1), "different numbers of ranks"),
        (printed(cluster(), "all_reduce", 2).replace("all_reduce_perf", "all_gather_perf"), "of another run"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        read(tmp_path, text)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(printed(cluster(), "all_gather", 2, sizes=SIZES[:3]).splitlines()),
            st.text(max_size=60),
        ),
        max_size=25,
    )
)
def test_no_text_breaks_the_reader(lines: list[str]) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", errors="replace") as file:
        file.write("\n".join(lines))
        file.flush()
        try:
            points = points_of_files([Path(file.name)])
        except UsageError:
            return
    assert all(point.us > 0 and point.nbytes > 0 and point.ranks > 1 for point in points)
