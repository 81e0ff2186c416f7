"""DHEN: what is under FSDP and what is not, and tables that several ranks share."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.families.dhen import SparseTables

FEATURES, ROWS, WIDTH, BATCH, STEPS = 5, 7, 3, 4, 3


def build(**fields: Any) -> Any:
    torch.manual_seed(0)
    return get_workload("dhen-tiny", shape=fields).build()


@pytest.fixture
def batch() -> tuple[torch.Tensor, ...]:
    return next(get_workload("dhen-tiny").batches(6, None, 0, 0, "cpu"))


def test_loss_is_binary_cross_entropy_of_the_logits(batch: tuple[torch.Tensor, ...]) -> None:
    numbers, ids, labels = batch
    model = build()
    logits = model(numbers, ids)
    assert logits.shape == (6,)
    probability = logits.sigmoid()
    expected = -torch.where(labels == 1, probability, 1 - probability).log().mean()
    torch.testing.assert_close(model(numbers, ids, labels), expected, rtol=1e-4, atol=1e-5)


def test_tables_are_no_parameters_but_learn(batch: tuple[torch.Tensor, ...]) -> None:
    model = build()
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert (26 * 1000, 16) not in shapes
    assert not list(model.buffers())
    assert model.sparse.own is None
    model(*batch).backward()
    table = model.sparse.own
    assert table is not None
    assert table.shape == (26 * 1000, 16)
    numbers, ids, _ = batch
    asked = {feature * 1000 + row for sample in ids.tolist() for feature, row in enumerate(sample)}
    assert set(table.abs().sum(dim=1).nonzero().flatten().tolist()) == asked
    # A second forward sees what the first backward wrote.
    before = build()(numbers, ids)
    assert not torch.equal(model(numbers, ids), before)


def test_every_parameter_learns(batch: tuple[torch.Tensor, ...]) -> None:
    model = build()
    model(*batch).backward()  # the first step fills the tables, which start as zeros
    model.zero_grad()
    model(*batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_block_sums_its_interactions() -> None:
    block = build().blocks[0]
    x = torch.randn(3, 8, 16)
    weight, bias = block.cross.weight, block.cross.bias
    cross = x * torch.einsum("oi,bi->bo", weight, x.reshape(3, 128)).add(bias).view(3, 8, 16)
    mixture = torch.einsum("ot,btw->bow", block.mixture.weight, x) + block.mixture.bias[:, None]
    query, key, value = block.attention.qkv(x).view(3, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
    weights = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
    attention = block.attention.output((weights @ value).transpose(1, 2).reshape(3, 8, 16))
    expected = F.layer_norm(x + cross + mixture + attention, (16,))
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------- several ranks, one table


def sample_ids(step: int) -> torch.Tensor:
    """Ids of all ranks' samples in a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(ROWS, (2 * BATCH, FEATURES), generator=generator)


def use_tables(ids_of_step: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows seen in each step, and the own table at the end, under the loss mean((row - feature)^2)."""
    tables = SparseTables(FEATURES, ROWS, WIDTH, torch.float32)
    goal = torch.arange(1.0, FEATURES + 1)[:, None]
    seen = []
    for step in range(STEPS):
        rows = tables(ids_of_step(step))
        seen.append(rows.detach())
        (rows - goal).square().sum(dim=(1, 2)).mean().backward()
    assert tables.own is not None
    return torch.stack(seen), tables.own


def run_rank(rank: int, world_size: int, store: str, results: Any) -> None:
    """One of several ranks; each has an equal share of the samples."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    share = 2 * BATCH // world_size
    seen, table = use_tables(lambda step: sample_ids(step)[rank * share : (rank + 1) * share])
    results.put((rank, seen.tolist(), table.tolist()))
    results.close()
    results.join_thread()
    dist.barrier()


def run_ranks(world_size: int, store: str) -> list[tuple[int, Any, Any]]:
    """Each rank's number, the rows that it saw, and its tables."""
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ranks = [
        fork.Process(target=run_rank, args=(rank, world_size, store, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
    return found


@pytest.mark.plain_cases("2")
@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_share_the_tables_of_one(in_forks: Any, world_size: int, tmp_path: Path) -> None:
    """5 tables over 2 ranks (3 and 2) and over 8 (some without any): what one process computes alone."""
    # Forked from a process without a simulated device: torch runs no backward in a fork of one whose
    # autograd has started threads for devices.
    program = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [__file__, str(world_size), str(tmp_path / "store"), str(tmp_path / "found.json")]
    (done,) = in_forks(program, [words])
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())

    seen, table = use_tables(sample_ids)
    rows_of_all = torch.cat([torch.tensor(rows) for _, rows, _ in found], dim=1)
    torch.testing.assert_close(rows_of_all, seen)
    by_feature = table.view(FEATURES, ROWS, WIDTH)
    for rank, _, own in found:
        expected = by_feature[rank::world_size].reshape(-1, WIDTH)
        torch.testing.assert_close(torch.tensor(own).reshape(-1, WIDTH), expected)


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(run_ranks(int(sys.argv[1]), sys.argv[2])))
