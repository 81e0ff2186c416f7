"""A large unit's reduction in pieces gives what one piece gives, takes less memory and does not race."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from race_cases import LOW, accumulate, follow, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl
from fsdpbench.impl.collectives import comm
from fsdpbench.impl.runtime import reduce_ways as pieces
from fsdpbench.impl.runtime.hooks import stage_of
from fsdpbench.impl.runtime.reduce_ways import Given, Pieces, plan_of
from fsdpbench.impl.runtime.streams import Streams


def case_pieces_sum_up(rank: int) -> None:
    """On real ranks, without streams: three parameters, one with rows that do not divide."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(rows, 8)) for rows in (4, 3, 6)])
    policy = impl.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    impl.fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    (unit,) = stage_of(module).units  # type: ignore[union-attr]
    gradients = [torch.full((rows, 8), rows + rank, dtype=torch.bfloat16) for rows in (4, 3, 6)]
    with mock.patch.object(pieces, "PIECE_BYTES", 4 * 4 * 8):
        plan = plan_of(unit, (0, 1, 2))
        assert list(plan.pieces) == [range(1), range(1, 2), range(2, 3)]
        assert [list(piece) for piece in plan_of(unit, (0, 2)).pieces] == [[0], [1]]
    reduce = Pieces(Given(unit, (0, 1, 2), gradients, comm.Averaging(dist.ReduceOp.SUM, 1.0, 1.0), plan))
    reduce.start(Streams(unit.device))
    for offset, rows, own in zip(plan.offsets, (4, 3, 6), (2, 2 - rank, 3), strict=True):
        assert torch.equal(reduce.output[offset : offset + own * 8], torch.full((own * 8,), 2.0 * rows + 1))


def test_pieces_sum_up(two_ranks) -> None:
    two_ranks.run(case_pieces_sum_up)


def case_in_order(rank: int) -> None:
    for arguments in ({"policy": LOW}, {"policy": LOW, "mesh": (2, 4), "memory_handover": "record_stream"}):
        with (
            mock.patch.object(pieces, "PIECE_BYTES", 1 << 10),
            mock.patch.object(Pieces, "start", autospec=True, side_effect=Pieces.start) as started,
        ):
            found, accesses = follow(accumulate, sharded, arguments)
        assert started.call_count
        assert accesses > 100
        assert not found


def test_pieces_do_not_race(lone_process) -> None:
    lone_process.run(case_in_order)
