"""Texts that are sampled on the device: their ends are not there, and their masks have a length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript


def test_sampled_texts_reach_their_longest(run_probe: RunScript) -> None:
    run = run_probe(
        """
        texts = torch.multinomial(torch.rand(32, device="cuda"), 48, True).view(4, 12)
        ends = torch.isin(texts, torch.tensor([2, 3], device="cuda"))
        lengths = torch.full((4,), 12, device="cuda")
        ended = ends.any(dim=1)
        lengths[ended] = ends.int().argmax(dim=1)[ended]
        mask = torch.arange(12, device="cuda").expand(4, -1) <= lengths.unsqueeze(1)
        assert [row[kept].numel() for row, kept in zip(texts.cpu(), mask.cpu())] == [12] * 4
        known = torch.isin(torch.tensor([1, 2, 3]).cuda(), torch.tensor([2, 5]).cuda())
        assert known.tolist() == [False, True, False]
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert {operation for operation, *_ in run.decisions} >= {"torch.isin", "torch.nonzero"}


ENDS = """
probabilities = torch.rand(4, 2000, device="cuda")
token = torch.multinomial(probabilities, 1)
done = torch.zeros(4, dtype=torch.bool, device="cuda")
for _ in range(3):
    token = torch.multinomial(probabilities, 1)
    token[done] = 2
    done |= token.squeeze(1) == 2
text = torch.cat([torch.arange(8).view(4, 2).cuda(), token], 1)
ends = text[:, 2:] == 2
first = torch.where(ends.any(1), ends.int().argmax(1), torch.full_like(token[:, 0], 1))
mask = torch.arange(1, device="cuda")[None] <= first[:, None]
assert text[:, 2:][mask].shape == (4,) and text[text != 0].shape == (12,)
choice = torch.multinomial(torch.rand(12, 4, device="cuda"), 1)
assert torch.rand(12, device="cuda")[choice[:, 0] == 1].shape == (3,)
train(2)
"""


@pytest.mark.parametrize("sanitize", [False, True])
def test_tokens_that_are_drawn_are_no_end(run_probe: RunScript, sanitize: bool) -> None:
    """A choice among few is balanced, as a router's; the sanitizer hides none of what is assumed."""
    run = run_probe(ENDS, sanitize=sanitize)
    assert run.result["status"] == "ok", run.cause
    lines = {line for operation, line, _ in run.decisions if operation in ("torch.eq", "torch.ne")}
    assert lines == {"none is: sampled texts reach their longest"}
    assumed = {answer for operation, answer, _ in run.decisions if operation == "torch.nonzero"}
    assert assumed == {"assumed: 0 of 4", "assumed: 4 of 4", "assumed: 12 of 12", "balanced: 3 of 12"}


def test_finite_numbers_are_all_that_there_are(run_probe: RunScript) -> None:
    run = run_probe(
        """
        x = torch.rand(6, 5, device="cuda")
        assert x[~torch.isnan(x)].shape == (30,) and x[x == x].shape == (30,)
        try:
            x[x > 0.5]
        except NotImplementedError as error:
            assert "depends on data" in str(error)
        else:
            raise AssertionError("a selection by values has no length")
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert {answer for _, answer, _ in run.decisions} == {"assumed: 30 of 30"}


def test_a_large_table_of_places_is_not_computed_on_the_host(run_probe: RunScript) -> None:
    """The table of 2 ** 18 squared bits would take 64 GiB."""
    run = run_probe(
        """
        places = torch.arange(2 ** 18, device="cuda")
        small = torch.arange(6, device="cuda") % 3
        assert small.tolist() == [0, 1, 2] * 2 and places.tolist()[-1] == 2 ** 18 - 1
        try:
            places[:, None] < places
        except torch.OutOfMemoryError:
            pass
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_a_future_of_a_gathered_list_has_nccl_s_flat_tensor(run_probe: RunScript) -> None:
    """DDP's hooks that quantise index it by rank."""
    run = run_probe(
        """
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
        dist.init_process_group("nccl")
        parts = [torch.empty(2, device="cuda") for _ in range(dist.get_world_size())]
        work = dist.all_gather(parts, torch.rand(2, device="cuda"), async_op=True)
        (flat,) = work.get_future().wait()
        assert flat.shape == (dist.get_world_size(), 2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
        model.register_comm_hook(dist.group.WORLD, quantization_pertensor_hook)
        model(torch.rand(4, 64, device="cuda")).sum().backward()
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_optimizers_find_the_size_of_the_cache(run_probe: RunScript) -> None:
    """timm's LAMB works on as many parameters as the cache holds."""
    run = run_probe(
        """
        properties = torch.cuda.get_device_properties(0)
        assert properties.L2_cache_size == 40 * 2 ** 20 and properties.shared_memory_per_block == 49152
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause
