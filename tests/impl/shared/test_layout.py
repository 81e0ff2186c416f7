"""Where elements lie: both layouts against ``torch.chunk`` and against a round trip through all ranks."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpbench.impl.fsdp1.flat_param import flat_layout
from fsdpbench.impl.shared.layout import ALIGNMENT_BYTES, CopyOut, UnitLayout, chunk_rows, chunked_layout

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)
WORLDS = st.integers(1, 7)


def values_of(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    start = 0
    tensors = []
    for shape in shapes:
        numel = math.prod(shape)
        tensors.append(torch.arange(start, start + numel).view(shape))
        start += numel
    return tensors


def cut(layout: UnitLayout, tensors: list[torch.Tensor]) -> torch.Tensor:
    shard = torch.full((layout.shard_numel,), -1)
    for segment, tensor in zip(layout.segments, tensors, strict=True):
        start, end = segment.shard_range
        shard[segment.shard_offset : segment.shard_offset + end - start] = tensor.reshape(-1)[start:end]
    return shard


@given(rows=st.integers(1, 40), world=WORLDS)
def test_rows_are_those_of_torch_chunk(rows: int, world: int) -> None:
    chunks = torch.arange(rows).chunk(world)
    for rank in range(world):
        start, end = chunk_rows(rows, world, rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, end)) == expected


@given(shapes=SHAPES, world=WORLDS, alike=st.integers(1, 3))
def test_chunked_shards_make_whole_parameters(shapes: list[tuple[int, ...]], world: int, alike: int) -> None:
    shapes = [shape for shape in shapes for _ in range(alike)]
    tensors = values_of(shapes)
    layouts = [chunked_layout(shapes, world, rank) for rank in range(world)]
    gathered = torch.cat([cut(layout, tensors) for layout in layouts])
    layout = layouts[0]
    assert gathered.numel() == layout.gathered_numel
    if not layout.rank_major:
        for segment, tensor in zip(layout.segments, tensors, strict=True):
            start = segment.shard_offset
            assert torch.equal(gathered[start : start + segment.numel].view(segment.shape), tensor)
        return
    for source in (None, gathered):
        full = torch.full((layout.full_numel,), -2)
        CopyOut(layout, full, source)(gathered)
        for segment, tensor in zip(layout.segments, tensors, strict=True):
            assert torch.equal(segment.in_full(full), tensor)


@given(shapes=SHAPES, world=WORLDS, element=st.sampled_from([2, 4, 8]))
def test_chunked_parameters_are_aligned_and_apart(
    shapes: list[tuple[int, ...]], world: int, element: int
) -> None:
    layout = chunked_layout(shapes, world, 0, element)
    end = 0
    for segment in layout.segments:
        assert segment.full_offset >= end
        assert segment.full_offset * element % ALIGNMENT_BYTES == 0
        end = segment.full_offset + segment.full_padded_numel
    assert end <= layout.full_numel


@given(shapes=SHAPES, world=WORLDS)
def test_chunked_gradients_lie_as_chunk_cat_puts_them(shapes: list[tuple[int, ...]], world: int) -> None:
    tensors = values_of(shapes)
    layouts = [chunked_layout(shapes, world, rank) for rank in range(world)]
    numel = sum(layouts[0].split_sizes) * world
    source = torch.zeros(numel, dtype=torch.int64)
    torch._chunk_cat(tensors, 0, world, out=source.view(world, -1))
    for rank, layout in enumerate(layouts):
        offset = 0
        for segment, tensor in zip(layout.segments, tensors, strict=True):
            start, end = segment.shard_range
            part = source.view(world, -1)[rank, offset : offset + end - start]
            assert torch.equal(part, tensor.reshape(-1)[start:end])
            offset += segment.shard_padded_numel


@given(shapes=SHAPES, world=WORLDS)
def test_flat_shards_are_the_parameters(shapes: list[tuple[int, ...]], world: int) -> None:
    tensors = values_of(shapes)
    layouts = [flat_layout(shapes, world, rank) for rank in range(world)]
    gathered = torch.cat([cut(layout, tensors) for layout in layouts])
    assert gathered.numel() == layouts[0].gathered_numel == layouts[0].full_numel
    assert gathered.numel() - layouts[0].parameter_numel < world
    for segment, tensor in zip(layouts[0].segments, tensors, strict=True):
        start = segment.full_offset
        assert torch.equal(gathered[start : start + segment.numel].view(segment.shape), tensor)


@given(shapes=SHAPES, world=WORLDS)
def test_flat_ranges_cover_each_parameter_once(shapes: list[tuple[int, ...]], world: int) -> None:
    for index, shape in enumerate(shapes):
        covered: list[int] = []
        for rank in range(world):
            start, end = flat_layout(shapes, world, rank).segments[index].shard_range
            covered += range(start, end)
        assert covered == list(range(math.prod(shape)))


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=3).map(tuple), min_size=1, max_size=3),
    world=WORLDS,
    data=st.data(),
)
def test_parts_of_other_dims(shapes: list[tuple[int, ...]], world: int, data: st.DataObject) -> None:
    """Each rank's part is that of ``torch.chunk``, and lies in the whole as ``blocks`` says."""
    dims = [data.draw(st.integers(1, len(shape) - 1)) for shape in shapes]
    shapes = [(*s[:dim], s[dim] * world, *s[dim + 1 :]) for s, dim in zip(shapes, dims, strict=True)]
    layouts = [chunked_layout([(7, 2), *shapes], world, rank, dims=[0, *dims]) for rank in range(world)]
    assert layouts[0].fused == 1
    for index, (tensor, dim) in enumerate(zip(values_of(shapes), dims, strict=True), start=1):
        pieces, size = layouts[0].segments[index].blocks
        whole = tensor.reshape(pieces, world, size)
        for rank, (layout, part) in enumerate(zip(layouts, tensor.chunk(world, dim), strict=True)):
            segment = layout.segments[index]
            assert segment.shard_shape == part.shape
            assert segment.shard_padded_numel == segment.shard_numel == part.numel()
            assert torch.equal(whole[:, rank].reshape(-1), part.reshape(-1))
