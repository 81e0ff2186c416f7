"""Whole numbers that come from the host stay known on the device: seeds, random states, labels, masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript


def test_a_random_state_comes_back_as_it_was(run_probe: RunScript) -> None:
    run = run_probe(
        """
        import torch.distributed as dist
        dist.init_process_group("nccl")
        state = torch.get_rng_state()
        sent = state.to("cuda")
        dist.broadcast(sent, src=0)
        assert torch.equal(sent.cpu(), state)
        torch.set_rng_state(sent.cpu())
        seed = state[:8].to("cuda")
        assert seed.cpu().view(torch.uint64).item() == state[:8].view(torch.uint64).item()
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert not run.decisions


def test_a_copy_into_host_memory_has_the_numbers(run_probe: RunScript) -> None:
    run = run_probe(
        """
        sums = torch.arange(12).to("cuda", non_blocking=True).view(3, 4).sum(dim=1)
        staged = torch.full((3,), 9, pin_memory=True)
        staged.copy_(sums, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        assert staged.tolist() == [6, 22, 38]
        staged.copy_(torch.randint(1, 9, (3,), device="cuda"))  # unknown, and not what was there before
        assert staged.tolist() == [0, 0, 0]
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_a_mask_of_labels_has_a_length(run_probe: RunScript) -> None:
    run = run_probe(
        """
        labels, mask = torch.randint(0, 50, (4, 32)), torch.ones(4, 32, dtype=torch.long)
        labels[:, :10], mask[1, 20:] = -100, 0
        there, shown = labels.cuda(), mask.to("cuda", non_blocking=True)
        hidden = torch.randn(4, 32, 16, device="cuda", requires_grad=True)
        valid = there != -100
        assert hidden[valid].shape == (88, 16) and there[valid].shape == (88,)
        assert int(valid.sum()) == 88 and not bool(shown.all()) and shown.sum().item() == 116
        both = (valid & shown.bool())[:, 1:]
        assert both.sum().item() == ((labels != -100) & mask.bool())[:, 1:].sum().item()
        assert shown.sum(1).tolist() == [32, 20, 32, 32]
        part = hidden[valid].sum(-1)
        whole = part.new_zeros(valid.shape).masked_scatter(valid, part)
        whole.sum().backward()
        assert hidden.grad.shape == hidden.shape
        there.add_(torch.randint(0, 9, (4, 32), device="cuda"))  # unknown from here on
        assert int((there == 0).sum()) == 0
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_a_checkpoint_loaded_onto_the_device_keeps_its_numbers(run_probe: RunScript, tmp_path: str) -> None:
    """Random states, counts, and the steps of an optimizer, which divides by `1 - beta ** step`."""
    run = run_probe(
        """
        import sys
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        state = {"rng": torch.get_rng_state(), "optimizer": optimizer.state_dict()}
        state |= {"seen": torch.tensor([3, 4, 5]), "rate": torch.tensor(2.5)}
        state["on"] = torch.tensor([True, False])
        torch.save(state, sys.argv[1])
        found = torch.load(sys.argv[1], map_location="cuda")
        assert torch.equal(found["rng"].cpu(), state["rng"])
        assert found["seen"].tolist() == [3, 4, 5] and (found["seen"] > 3).sum().item() == 2
        assert found["rate"].item() == 2.5 and found["on"].tolist() == [True, False]
        optimizer.load_state_dict(found["optimizer"])
        for _ in range(6):
            step()
        steps = [float(each["step"]) for each in optimizer.state.values()]
        assert steps == [7.0, 7.0], steps
        """,
        f"{tmp_path}/saved.pt",
    )
    assert run.result["status"] == "ok", run.cause


def test_whole_numbers_are_computed_beside(run_probe: RunScript) -> None:
    """Masks of labels that were changed, offsets, partial writes, and positions of a mask."""
    run = run_probe(
        """
        import torch.nn.functional as F
        torch.manual_seed(3)
        ids, mask = torch.randint(0, 50, (4, 32)), (torch.rand(4, 32) > 0.3).long()
        there, shown = ids.cuda(), mask.cuda()
        hidden = torch.randn(4, 32, 16, device="cuda")

        def same(found, wanted):
            assert found.device.type == "cuda" and torch.equal(found.cpu(), wanted), (found.cpu(), wanted)

        labels, expected = there.masked_fill(shown == 0, -100), ids.masked_fill(mask == 0, -100)
        same(labels, expected)
        shifted, wanted = (F.pad(each, (0, 1), value=-100)[..., 1:] for each in (labels, expected))
        same(shifted, wanted)
        assert hidden[shifted != -100].shape[0] == int((wanted != -100).sum())
        same(torch.add(there, shown, alpha=3), torch.add(ids, mask, alpha=3))
        labels[:, :5], expected[:, :5] = -100, -100
        labels[labels == 7], expected[expected == 7] = -1, -1
        same(labels, expected)
        blank, host = torch.full_like(there, -100), torch.full_like(ids, -100)
        blank[:, 3:], host[:, 3:] = there[:, 3:], ids[:, 3:]
        same(blank, host)
        for ends, wanted in ((shown.sum(1).cumsum(0), mask.sum(1).cumsum(0)),):
            same(torch.cat([ends.new_zeros(1), ends]), torch.cat([wanted.new_zeros(1), wanted]))
        same(there[shown.bool()], ids[mask.bool()])
        same(shown.nonzero(), mask.nonzero())
        largest = torch.where(shown > 0, there, -1).max(dim=1).values
        same(largest, torch.where(mask > 0, ids, -1).max(dim=1).values)
        assert hidden[torch.ones(4, 32, dtype=torch.bool, device="cuda")].shape == (128, 16)
        labels[:] = torch.argmax(torch.rand(4, 32, 9, device="cuda"), -1)  # unknown from here on
        assert labels.cpu().sum() == 0
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_rows_written_into_a_tensor_of_the_device_are_known(run_probe: RunScript) -> None:
    run = run_probe(
        """
        ids = torch.zeros(3, 6, dtype=torch.long, device="cuda")
        there = torch.zeros(3, 6, dtype=torch.bool, device="cuda")
        for row, length in enumerate((2, 5, 3)):
            ids[row, :length] = torch.arange(1, length + 1)
            there[row, :length] = True
        assert torch.randn(3, 6, 4, device="cuda")[there].shape == (10, 4)
        assert ids.cpu().tolist() == [[1, 2, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0], [1, 2, 3, 0, 0, 0]]
        ids[0, 1:3] = torch.randint(0, 9, (2,), device="cuda")  # unknown from here on
        assert ids.cpu().sum() == 0
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause
