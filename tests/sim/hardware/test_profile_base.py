"""A profile may stand on a packaged one and say only what differs."""

from __future__ import annotations

import pytest

from fsdpbench.sim.model.profile import ProfileError, load_profile, parse_profile


def test_only_what_is_said_differs() -> None:
    base, derived = load_profile("a100-80gb"), load_profile("a100-80gb-roce2000")
    assert derived.name == "a100-80gb-roce2000"
    assert derived.nic.gb_s_per_node == 250
    assert derived.nic.base_us == base.nic.base_us
    assert derived.gemm == base.gemm
    assert derived.sources["gemm"] == base.sources["gemm"]
    assert derived.sources["nic"] != base.sources["nic"]


def test_an_unknown_base_is_named() -> None:
    with pytest.raises(ProfileError, match=r"mine\.toml.*a900"):
        parse_profile('base = "a900"\nname = "mine"\n', "mine.toml")
