"""`repeat_interleave` by counts on the device: known counts give its length, others are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript


def test_counts_of_a_balanced_router(run_probe: RunScript) -> None:
    run = run_probe(
        """
        experts, bias = 8, torch.zeros(8, 16, device="cuda", requires_grad=True)
        chosen = torch.randn(64, experts, device="cuda").topk(2).indices
        counts = torch.histc(chosen.flatten().float(), bins=experts, min=0, max=experts - 1)
        padded = ((counts.clamp_min(8) + 7) // 8 * 8).to(torch.int32).long()
        rows = bias.repeat_interleave(padded, dim=0)
        assert rows.shape == (128, 16), rows.shape
        rows.sum().backward()
        counts = torch.ones(8, dtype=torch.long, device="cuda")
        assert bias.repeat_interleave(counts, dim=0, output_size=40).shape[0] == 40
        try:
            bias.repeat_interleave(torch.randint(0, 3, (8,), device="cuda"), dim=0)
        except NotImplementedError as error:
            assert "output_size=" in str(error)
        else:
            raise AssertionError
        train(3)
        """
    )
    assert run.result["status"] == "ok", run.cause
