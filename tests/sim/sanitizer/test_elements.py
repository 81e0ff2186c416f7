"""Accesses conflict by the elements that they touch: regions against brute force, views, schemas."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.sim.followers.sanitizer.regions import overlap, region_of
from fsdpbench.sim.torch_device.followed import Region

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    dimensions = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(dimensions))
    strides = tuple(draw(st.integers(0, 20)) for _ in range(dimensions))
    return shape, strides, draw(st.integers(0, 30))


def touched(geometry: Geometry, itemsize: int) -> set[int]:
    shape, strides, offset = geometry
    elements = (
        offset + sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in itertools.product(*map(range, shape))
    )
    return {element * itemsize + byte for element in elements for byte in range(itemsize)}


@given(geometries(), geometries(), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 8]))
@settings(max_examples=400, deadline=None)
def test_shared_bytes_are_those_of_brute_force(
    first: Geometry, second: Geometry, size: int, other_size: int
) -> None:
    regions = [region_of(*geometry, each) for geometry, each in ((first, size), (second, other_size))]
    assert regions[0] is not None
    assert regions[1] is not None
    expected = len(touched(first, size) & touched(second, other_size))
    assert overlap(regions[0], regions[1]) == expected
    assert overlap(regions[1], regions[0]) == expected


def test_regions_without_holes_are_intervals() -> None:
    assert region_of((4, 8), (8, 1), 2, 4) == Region(8, 8 + 128)
    assert region_of((8, 4), (1, 8), 0, 4) == Region(0, 128)
    assert region_of((3, 5), (0, 1), 0, 2) == Region(0, 10)
    assert region_of((3, 0), (0, 1), 0, 2) is None


def test_columns_of_one_matrix_too_large_to_list() -> None:
    rows = 1 << 22
    left, right = (region_of((rows, 2), (4, 1), offset, 4) for offset in (0, 2))
    across = region_of((rows, 2), (4, 1), 1, 4)
    assert left is not None
    assert right is not None
    assert across is not None
    assert overlap(left, right) == 0
    assert overlap(left, across) > 0


@pytest.mark.simulated
def test_columns_on_two_streams() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    shared, side = matrix(), torch.sim.Stream()
    shared[:, :128].add_(1)
    with torch.sim.stream(side):
        shared[:, 128:].add_(1)
    assert kinds(sanitizer) == []
    with torch.sim.stream(side):
        shared[:, 127:].add_(1)
    assert kinds(sanitizer) == ["race"]


@pytest.mark.simulated
def test_views_of_one_storage_are_one_memory() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    shared, side = matrix(), torch.sim.Stream()
    first, second = shared.view(-1)[:1000], shared.t()
    first.zero_()
    with torch.sim.stream(side):
        second.mul_(2)
    assert kinds(sanitizer) == ["race"]


@pytest.mark.simulated
def test_shapes_alone_are_no_access() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    shared, side = matrix(), torch.sim.Stream()
    shared.add_(1)
    with torch.sim.stream(side):
        torch.zeros_like(shared)
        shared.view(-1)
        shared.new_ones(3)
    assert kinds(sanitizer) == []


@pytest.mark.simulated
def test_batch_norm_writes_its_running_statistics() -> None:
    """Its schema does not say so."""
    from sanitized import kinds, start

    sanitizer = start()
    norm, side = torch.nn.BatchNorm1d(16).to("sim"), torch.sim.Stream()
    batch = torch.randn(8, 16, device="sim")
    torch.sim.synchronize()
    with torch.no_grad():
        norm(batch)
        with torch.sim.stream(side):
            norm.running_mean.sum()
        assert kinds(sanitizer) == ["race"]
        torch.sim.synchronize()
        norm.eval()
        norm(batch)
        with torch.sim.stream(side):
            norm.running_mean.sum()
    assert kinds(sanitizer) == ["race"]


@pytest.mark.simulated
def test_optimizers_of_all_kinds_write_parameters() -> None:
    from sanitized import kinds, start

    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        sanitizer = start()
        layer, side = torch.nn.Linear(8, 8, device="sim"), torch.sim.Stream()
        layer(torch.randn(2, 8, device="sim")).sum().backward()
        optimizer = torch.optim.AdamW(layer.parameters(), **options)
        optimizer.step()
        torch.sim.synchronize()
        optimizer.step()
        with torch.sim.stream(side):
            layer.weight.detach().sum()
        assert kinds(sanitizer) == ["race"], options
        (finding,) = sanitizer.findings
        assert finding.to_dict()["first"]["phase"] == "optimizer"
