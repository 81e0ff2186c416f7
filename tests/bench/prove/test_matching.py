"""Faults named by what they make of the ranks' own gradients, on random ones; right gradients never are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.answers.prove.matching import Known, cut, explain, is_right, tolerance
from fsdpbench.script.real_ranks.pieces import Piece, keep, whole

SHAPE = (6, 5)


def known_of(ranks: int, microbatches: int, seed: int, low: torch.dtype = torch.float32) -> Known:
    generator = torch.Generator().manual_seed(seed)
    local = [
        [torch.randn(SHAPE, generator=generator).double() for _ in range(microbatches)] for _ in range(ranks)
    ]
    every = torch.stack([torch.stack(each).sum(0) for each in local])
    size = torch.stack([torch.stack(each).abs().sum(0) for each in local])
    share = tolerance(torch.finfo(low).eps, 0.0, ranks, microbatches, 8)
    return Known(every.mean(0), size.mean(0), local, 1 / ranks, share, 0.0)


def shards(of_rank: list[torch.Tensor], low: torch.dtype = torch.float32) -> list[Piece]:
    """Rows by rank, as FSDP2 holds them; uneven ones."""
    ranks, rows = len(of_rank), -(-SHAPE[0] // len(of_rank))
    found = []
    for rank in range(ranks):
        start = min(rank * rows, SHAPE[0])
        part = of_rank[rank][start : min(start + rows, SHAPE[0])]
        found.append(Piece(SHAPE, (start, 0), part.to(low)))
    return found


def own(known: Known) -> list[torch.Tensor]:
    return [torch.stack(list(each)).sum(0) for each in known.local]


FAULTS = {
    "own": ("each rank keeps its own", lambda known: own(known)),
    "divided": (
        "each rank keeps its own, divided",
        lambda known: [each / known.ranks for each in own(known)],
    ),
    "rank 1": ("that of rank 1 alone", lambda known: [own(known)[1]] * known.ranks),
    "sum": ("not divided by the 4 ranks", lambda known: [known.mean * known.ranks] * known.ranks),
    "divided twice": ("divided by the 4 ranks twice", lambda known: [known.mean / known.ranks] * known.ranks),
    "first microbatch": (
        "of microbatch 1 of 2 only",
        lambda known: [sum(each[0] for each in known.local) / known.ranks] * known.ranks,
    ),
    "halves": (
        "reduced over 2 of the 4 ranks only",
        lambda known: [(own(known)[rank // 2 * 2] + own(known)[rank // 2 * 2 + 1]) / 2 for rank in range(4)],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=6, deadline=None)
def test_each_fault_is_named(name: str, seed: int) -> None:
    fault, make = FAULTS[name]
    known = known_of(4, 2, seed)
    pieces = shards(make(known))
    assert not is_right(pieces, known)
    assert explain(pieces, known, None) == fault


@given(
    ranks=st.sampled_from((2, 3, 4, 8)),
    microbatches=st.integers(1, 5),
    low=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=25, deadline=None)
def test_rounding_in_the_dtype_of_reduction_is_right(
    ranks: int, microbatches: int, low: torch.dtype, seed: int
) -> None:
    known = known_of(ranks, microbatches, seed, low)
    total = torch.zeros(SHAPE, dtype=low)
    for each in known.local:
        rank = torch.zeros(SHAPE, dtype=low)
        for microbatch in each:
            rank = rank + microbatch.to(low)
        total = total + rank
    assert is_right(shards([total / ranks] * ranks, low), known)


def test_an_old_gradient_is_named() -> None:
    known, last = known_of(4, 1, 1), known_of(4, 1, 2)
    pieces = shards([known.mean + last.mean] * 4)
    assert "the step before" in explain(pieces, known, shards([last.mean] * 4))
    unlike = shards([last.mean * 3] * 4)
    assert explain(unlike, known, None) == ""


def test_pieces_make_the_whole_again() -> None:
    tensor = torch.arange(30.0).reshape(SHAPE)
    flat = [
        Piece(SHAPE, (0,), tensor.reshape(-1)[:7], True),
        Piece(SHAPE, (7,), tensor.reshape(-1)[7:], True),
    ]
    for pieces in (shards([tensor] * 4), flat, [Piece(SHAPE, (0, 0), tensor)] * 2):
        found = whole(pieces)
        assert found is not None
        assert torch.equal(found.values, tensor)
        assert not found.apart
        assert all(torch.equal(cut(tensor, piece), piece.values) for piece in pieces)
    other = whole([Piece(SHAPE, (0, 0), tensor), Piece(SHAPE, (0, 0), tensor + 1)])
    assert other is not None
    assert other.apart


def test_what_a_rank_leaves_is_whole(tmp_path: Path) -> None:
    """A rank that is killed while it writes leaves nothing, not half a file that a reader stumbles on."""
    with pytest.raises(AttributeError, match="pickle"):
        keep({"weight": torch.ones(3), "later": lambda: 0}, tmp_path / "rank0.pt")
    assert not [*tmp_path.iterdir()]
    keep({"weight": torch.ones(3)}, tmp_path / "rank0.pt")
    assert torch.load(tmp_path / "rank0.pt")["weight"].tolist() == [1, 1, 1]
