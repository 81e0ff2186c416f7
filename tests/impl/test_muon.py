"""`Muon` of sharded matrices equals torch's of whole ones; as many matrices as ranks take two all-to-alls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdpbench.impl import Muon, fully_shard

# Rows that do not divide, fewer rows than ranks, wide, tall; five matrices, so that a batch is incomplete.
SHAPES = ((7, 5), (4, 12), (1, 6), (12, 4), (8, 8))


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)

    def forward(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return sum((weight * torch.randn(weight.shape)).square().sum() for weight in self.weights)  # type: ignore[return-value]


def case_equal_to_unsharded(
    rank: int, mesh: tuple[int, ...], columns: bool = False, **options: Any
) -> dict[str, int]:
    names = ("replicate", "shard")[-len(mesh) :]
    whole, sharded = Matrices(), Matrices()
    placement = {"shard_placement_fn": lambda parameter: Shard(1 - parameter.shape[1] % 2)} if columns else {}
    fully_shard(sharded, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), **placement)
    theirs = torch.optim.Muon(whole.parameters(), lr=0.1, **options)
    mine = Muon(sharded.parameters(), lr=0.1, **options)
    counts: dict[str, int] = {}
    for step in range(3):
        for model in (whole, sharded):
            model(step).backward()
        with CommDebugMode() as calls:
            mine.step()
        counts = {str(kind): count for kind, count in calls.get_comm_counts().items()}
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    for expected, actual in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert isinstance(actual, DTensor)
        assert isinstance(mine.state[actual]["momentum_buffer"], DTensor)
        assert torch.equal(actual.full_tensor(), expected)
    return counts


CASES: dict[str, dict[str, Any]] = {
    "sharded": {"mesh": (2,)},
    "replicated_too": {"mesh": (2, 1)},
    "no_nesterov_match_rms": {"mesh": (2,), "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    "columns": {"mesh": (2,), "columns": True},
}


@pytest.mark.plain_cases("sharded", "columns")
@pytest.mark.parametrize("case", CASES)
def test_equal_to_torch(case: str, two_ranks: Any) -> None:
    counts = two_ranks.run(case_equal_to_unsharded, **CASES[case])
    if case == "sharded":
        # Five matrices on two ranks: three batches, there and back.
        assert counts == {"c10d.alltoall_base_": 6}


@pytest.mark.campaign
def test_four_ranks(four_ranks: Any) -> None:
    four_ranks.run(case_equal_to_unsharded, mesh=(4,))
    four_ranks.run(case_equal_to_unsharded, mesh=(2, 2))


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="2D"):
        Muon([nn.Parameter(torch.ones(3))])
