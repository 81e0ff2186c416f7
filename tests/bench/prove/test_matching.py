"""Faults named by what they make of the ranks' own gradients, on random ones; right gradients never are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.answers.prove.matching import Known, cut, explain, is_right, reduction, tolerance
from fsdpbench.script.real_ranks.pieces import Piece, keep, whole

SHAPE = (6, 5)


def known_of(ranks: int, microbatches: int, seed: int, low: torch.dtype = torch.float32) -> Known:
    generator = torch.Generator().manual_seed(seed)
    local = [
        [torch.randn(SHAPE, generator=generator).double() for _ in range(microbatches)] for _ in range(ranks)
    ]
    every = torch.stack([torch.stack(each).sum(0) for each in local])
    size = torch.stack([torch.stack(each).abs().sum(0) for each in local])
    share, absolute = reduction(torch.finfo(low).eps, ranks, microbatches)
    return Known(every.mean(0), size.mean(0), local, 1 / ranks, share + tolerance(0.0, 8), absolute)


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


LOW = (torch.bfloat16, torch.float16)


@given(
    ranks=st.sampled_from((2, 3, 4, 8)),
    microbatches=st.integers(1, 4),
    low=st.sampled_from(LOW),
    size=st.sampled_from((1e-9, 1e-7, 1e-5, 1.0)),
    positive=st.booleans(),
    scaled_first=st.booleans(),
    unsynchronised=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_low_reduction_of_single_gradients_is_right(
    ranks: int,
    microbatches: int,
    low: torch.dtype,
    size: float,
    positive: bool,
    scaled_first: bool,
    unsynchronised: bool,
    seed: int,
) -> None:
    """Converted once, added in `low` in any order, and scaled before or after: also of one sign, where each
    addition rounds most, and below the normal numbers of float16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ranks, microbatches, *SHAPE)
    local = torch.randn(shape, generator=generator) * size
    local = local.abs() if positive else local
    exact = [list(each) for each in local.double()]
    share, absolute = reduction(torch.finfo(low).eps, ranks, microbatches)
    known = Known(
        local.double().sum(1).mean(0), local.double().abs().sum(1).mean(0), exact, 1 / ranks, share, absolute
    )
    found = torch.zeros(SHAPE)
    rows = [local.sum(1)] if unsynchronised and low is torch.float16 else local.unbind(1)
    for each in rows:
        parts = each.to(low) / (ranks if scaled_first else 1)
        total = torch.zeros(SHAPE, dtype=low)
        for rank in torch.randperm(ranks, generator=generator).tolist():
            total = total + parts[rank]
        found = found + (total if scaled_first else total / ranks).float()
    assert is_right(shards([found] * ranks), known)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("fault", ["a tenth larger", "a fifth of a microbatch", "a quarter of a rank"])
def test_small_faults_of_low_reduction_are_found(low: torch.dtype, fault: str) -> None:
    """Each is less than N + M + 8 epsilons of bfloat16."""
    for seed in range(20):
        known = known_of(4, 2, seed, low)
        wrong = known.mean.clone()
        if fault == "a tenth larger":
            wrong *= 1.1
        elif fault == "a fifth of a microbatch":
            wrong -= 0.2 * sum(each[0] for each in known.local) / known.ranks
        else:
            wrong += 0.25 * (known.local[0][0] - known.local[1][0]) / known.ranks
        assert not is_right(shards([wrong] * 4), known)
        if low is torch.bfloat16:
            assert is_right(shards([wrong] * 4), replace(known, tolerance=14 * torch.finfo(low).eps))


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
