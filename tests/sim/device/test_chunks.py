"""Chunks that are cut when asked for are those that FSDP2 would have cut."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from fsdpbench.sim.torch_device.patches.dtensor import Chunks, cut_when_asked
from fsdpbench.sim.torch_device.patches.dynamo import passing_to


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11])
@pytest.mark.parametrize(("shape", "dim"), [((10, 6), 0), ((8,), 0), ((1, 4), 0), ((3, 10), 1)])
def test_they_are_the_same_views(shape: tuple[int, ...], dim: int, count: int) -> None:
    tensor = torch.empty(shape, device="meta")

    cut = Chunks(tensor, count, dim)

    expected = _chunk_with_empty(tensor, count, dim)
    assert len(cut) == len(expected)
    for found, wanted in zip(cut, expected, strict=True):
        assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
        assert found.storage_offset() == wanted.storage_offset()
    assert cut[-1].shape == expected[-1].shape
    assert [chunk.shape for chunk in cut[1:]] == [chunk.shape for chunk in expected[1:]]


@pytest.mark.parametrize("index", [4, -5])
def test_there_are_no_more(index: int) -> None:
    with pytest.raises(IndexError, match=f"chunk {index} of 4"):
        Chunks(torch.empty(8, device="meta"), 4, 0)[index]


def test_tensors_with_data_and_without_elements_are_left_to_torch() -> None:
    cut = passing_to(cut_when_asked)(_chunk_with_empty)

    assert isinstance(cut(torch.empty(4, device="meta"), 2, 0), Chunks)
    assert isinstance(cut(torch.empty(4), 2, 0), list)
    assert isinstance(cut(torch.empty(0, device="meta"), 2, 0), list)
