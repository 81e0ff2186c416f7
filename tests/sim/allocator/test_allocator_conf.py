"""Reading PYTORCH_CUDA_ALLOC_CONF."""

from __future__ import annotations

import pytest

from fsdpbench.sim.model.allocator import AllocatorConf, AllocatorConfError, AllocatorCosts

MIB = 1 << 20


def test_every_key_is_read():
    conf = AllocatorConf.parse(
        "max_split_size_mb:128, garbage_collection_threshold:0.8,expandable_segments:True,"
        "roundup_power2_divisions:[256:1,512:2,>:8],max_non_split_rounding_mb:40,per_process_memory_fraction:0.5,"
        "backend:native,pinned_use_background_threads:True"
    )
    assert conf.max_split_bytes == 128 * MIB
    assert conf.garbage_collection_threshold == 0.8
    assert conf.expandable_segments
    assert conf.max_non_split_rounding_bytes == 40 * MIB
    assert conf.per_process_memory_fraction == 0.5
    assert conf.roundup_power2_divisions == (1,) * 9 + (2,) + (8,) * 6


def test_nothing_is_torchs_default():
    assert AllocatorConf.parse("") == AllocatorConf()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:64", "did you mean max_split_size_mb"),
        ("max_split_size_mb:20", "must be above 20"),
        ("max_split_size_mb:many", "max_split_size_mb:many"),
        ("garbage_collection_threshold:1.5", "must be in"),
        ("expandable_segments:yes", "must be True or False"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[256:1", "brackets"),
        ("expandable_segments", "expected key:value"),
        ("per_process_memory_fraction:0", "must be in"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(AllocatorConfError, match=message):
        AllocatorConf.parse(text)


def test_costs_are_not_negative():
    with pytest.raises(AllocatorConfError, match="free_ns"):
        AllocatorCosts(free_ns=-1)
