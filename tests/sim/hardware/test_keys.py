"""Every figure of a profile has a unit and a range, and is held to it; far figures are warnings."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdpbench.sim.model.profile as hardware
from fsdpbench.base.files.documents import to_toml
from fsdpbench.lab.calibrate.from_results.fit import Factor, ScaledProfile
from fsdpbench.sim.model.keys import KEYS, Key, far_figures, figures
from fsdpbench.sim.model.profile import ProfileError, load_profile, parse_profile, profile_names
from fsdpbench.sim.model.software import load_software, software_names

ROOT = Path(__file__).parents[3]
PROFILES = Path(hardware.__file__).parents[1] / "profiles"
BASE = 'base = "h100-80gb"\nname = "mine"\n'


def packaged() -> Iterator[tuple[Key, float]]:
    for profile in (*map(load_profile, profile_names()), *map(load_software, software_names())):
        yield from ((key, value) for key, _, value in figures(profile))


def test_every_row_is_of_a_key_and_every_key_has_a_row() -> None:
    """A figure without a row raises as profiles are read; a row that no profile has is of no key."""
    assert {key.name for key, _ in packaged()} == set(KEYS)


def test_a_key_without_a_row_cannot_be_added() -> None:
    @dataclasses.dataclass(frozen=True)
    class More:
        warp_us: float = 1.0

    cpu = dataclasses.make_dataclass("Cpu", [("cpu", Any)])(More())
    with pytest.raises(ProfileError, match=r"unknown key cpu\.warp_us"):
        list(figures(cpu))


def test_what_is_usual_is_what_packaged_profiles_have() -> None:
    found: dict[str, list[float]] = {}
    for key, value in packaged():
        found.setdefault(key.name, []).append(value)
    for name, values in found.items():
        key = KEYS[name]
        assert key.least <= key.low <= min(values), name
        assert max(values) <= key.high <= key.most, name
        assert key.low in (0, pytest.approx(min(values), rel=0.06)), name
        assert key.high == pytest.approx(max(values), rel=0.06) or key.high in (1.0, 1e6), name


def test_no_packaged_profile_is_doubtful() -> None:
    assert {name: doubts for name in profile_names() if (doubts := load_profile(name).doubts())} == {}


def scalars(table: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from scalars(value, (*place, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*place, name)


A100 = tomllib.loads((PROFILES / "a100-40gb.toml").read_text())
PLACES = sorted(scalars(A100))


def changed(place: tuple[str, ...], value: Any) -> str:
    table: dict[str, Any] = {"base": "a100-40gb", "name": "mine"}
    node = table
    for part in place[:-1]:
        node = node.setdefault(part, {})
    node[place[-1]] = value
    return to_toml(table)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_figure_outside_of_its_range_is_refused_with_key_value_range_and_unit(
    place: tuple[str, ...],
) -> None:
    name = ".".join(place)
    key = KEYS[name]
    whole = isinstance(key_value(place), int) and name in ("compute.sm_count", "nvlink.curve_ranks")
    for value in (-1.0, key.most * 1.01 + 1, 1e17, *([key.least * 0.5] if key.least else [])):
        wrong = math.floor(value) if whole or name in ("gpus_per_node", "compute.fp32_lanes") else value
        with pytest.raises(ProfileError) as caught:
            parse_profile(changed(place, wrong), "mine.toml")
        told = str(caught.value)
        assert f"{name} = {wrong}" in told.replace(f"= {float(wrong)}", f"= {wrong}")
        assert f"must be from {key.least:,g} to {key.most:,g} {key.unit}" in told


def key_value(place: tuple[str, ...]) -> Any:
    node: Any = A100
    for part in place:
        node = node[part]
    return node


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[memory]\nnccl_mib_per_communicator = -300000\n", "nccl_mib_per_communicator = -300000.0: must"),
        ("[memory]\ncontext_mib = 65000\ncapacity_gib = 60\n", "must not exceed the memory"),
        ("[attention]\nforward_tflops = 1000\n", "forward_tflops = 1000: must not exceed compute.pea"),
        ("[compute]\npeak_tflops = { bf16 = 300, fp16 = 300 }\n", "must not exceed compute.peak_tflops, 300"),
        ("[bandwidth]\nfused_gain = 2\n", "must not exceed the memory's bandwidth"),
        ("[bandwidth]\nefficiency = { pointwize = 0.5 }\n", "did you mean bandwidth.efficiency.pointwise"),
        ("[host_link]\ngb_s = 9000\n", "must not exceed memory.bandwidth_gb_s, 3352"),
        ("[nvlink]\npeak_gb_s = 100\n", "must not exceed twice nvlink.peak_gb_s, 200"),
        ("[nvlink]\nall_gather = { points = [[1e4, 0.01], [1e6, 300]] }\n", "more bytes must not take less"),
        ("[nvlink]\nall_gather = { points = [] }\n", "nvlink.all_gather.points = []: needs at least one"),
        ("[nvlink]\nall_gather = { points = [[]] }\n", "points = []: each is [bytes, GB/s]"),
        ("[nvlink]\nall_gather = { points = [[1e4, 1e9]] }\n", "all_gather.points[0].gb_s = 1000000000.0"),
        ("[gemm]\ntiles = [[1e9, 128, 1.0]]\n", "gemm.tiles[0].rows = 1000000000.0: must be"),
        ("[nic]\nprotocols = []\n", "nic.protocols = (): needs at least one"),
        ("[nic.protocols]\n", "nic.protocols = {}: must be a list"),
        ("[libraries.x.products.bf16]\n", "lacks the key libraries.x.version"),
        ('title = "\\u001b[31m"\n', "title: must be one line"),
        (f'title = "{"x" * 5000}"\n', "title: must be one line of up to 2,000"),
        (f"runs_use = {['nccl'] * 5000}\n", "runs_use: 5,000 entries"),
        ("[memory]\ncapacity_gib = true\n", "memory.capacity_gib = True: must be a number"),
        ("[memory]\ncapacity_gib = nan\n", "memory.capacity_gib = nan: must be a finite number"),
        ("memory = 5\n", "memory = 5: must be a table"),
        ("compute = 5\n", "compute = 5: must be a table"),
        ("[compute]\npeak_tflops = [1]\n", "compute.peak_tflops"),
    ],
)  # fmt: skip
def test_figures_that_cannot_be_are_refused(text: str, told: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_profile(BASE + text, "mine.toml")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nic.gb_s_per_node", "memory.bandwidth_gb_s", "cpu.launch_us"])
def test_a_figure_far_from_every_packaged_profile_is_a_doubt(name: str) -> None:
    key, place = KEYS[name], tuple(name.split("."))
    for value, far in ((key.high * 10, False), (key.high * 10.1, True), (key.low / 10, False)):
        profile = parse_profile(changed(place, value), "mine.toml")
        assert any(text.startswith(f"{name} = ") and key.unit in text for text in profile.doubts()) is far
    assert far_figures(parse_profile(changed(("cpu", "launch_us"), 0.0), "mine.toml"))


def test_doubts_of_other_kinds() -> None:
    assert "links inside a node" in " ".join(load_profile("gb200+node-72").doubts())
    clock = parse_profile(BASE + "[compute]\nsm_count = 20\n", "mine.toml").doubts()
    assert "would need a clock of 13.1 GHz" in " ".join(clock)
    # Software that makes a kernel faster than the chip is.
    fast = dataclasses.replace(load_software("current"), name="mine", sources={"attention": "a test"})
    fast = dataclasses.replace(fast, attention=dataclasses.replace(fast.attention, forward_rate=9.0))
    assert "attention.forward_tflops = 5715: must not" in " ".join(
        fast.applied_to(load_profile("h100-80gb")).doubts()
    )


def test_what_is_fitted_is_in_range_too(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nic\.gb_s_per_node = .*must be from"):
        ScaledProfile("h100-80gb", {Factor.NETWORK: 1e4}).write(tmp_path / "mine.toml", {}, "a test")


def test_the_page_shows_the_table() -> None:
    spec = importlib.util.spec_from_file_location("keys_page", ROOT / "ci" / "docs" / "keys_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.keys_table().strip().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [key.name for key in KEYS.values()]
