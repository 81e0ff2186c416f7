"""Tensors that a script wants on the host are there, and cost no device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript


def test_likenesses_lie_where_the_script_says(run_probe: RunScript) -> None:
    run = run_probe(
        """
        x = torch.randn(1 << 20, device="cuda").view(1024, 1024).t()
        before = torch.cuda.memory_allocated()
        for make in (torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like):
            made = make(x, device="cpu")
            assert made.device.type == "cpu" and made.shape == x.shape and made.dtype == x.dtype, make
        assert float(torch.ones_like(x, device="cpu").sum()) == 1 << 20
        assert torch.full_like(x, 3.0, device="cpu", dtype=torch.float64)[5, 7] == 3.0
        for made in (x.new_zeros(3, device="cpu"), x.new_full((2, 2), 1.0, device="cpu")):
            assert made.device.type == "cpu"
        assert torch.cuda.memory_allocated() == before
        assert torch.zeros_like(x).is_cuda and torch.zeros_like(torch.ones(3), device="cuda").is_cuda
        train(7)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_pinned_memory_can_be_asked_for(run_probe: RunScript) -> None:
    run = run_probe(
        """
        for made in (torch.empty(3, pin_memory=True), torch.tensor([1.0], pin_memory=True),
                     torch.empty_like(torch.ones(3, device="cuda"), device="cpu", pin_memory=True)):
            assert made.is_pinned()
            made.to("cuda", non_blocking=True)
        layer = torch.nn.Linear(64, 64).cuda()
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            y = layer(torch.ones(4, 64, device="cuda")).relu()
        y.sum().backward()
        train(7)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_scripted_functions_may_use_what_is_replaced(run_probe: RunScript) -> None:
    run = run_probe(
        """
        from torch.distributed.optim import ZeroRedundancyOptimizer  # scripts functions at import

        @torch.jit.script
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros([3]).sum() + torch.full_like(x, 2.0) + torch.isfinite(x).all().int()

        assert scaled(torch.ones(3)).tolist() == [4.0, 4.0, 4.0]
        assert scaled(torch.ones(3, device="cuda")).is_cuda
        train(7)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_an_operator_without_shapes_is_not_said_to_depend_on_data(run_probe: RunScript) -> None:
    run = run_probe("torch.geqrf(torch.ones(4, 4, device='cuda'))")
    assert run.result["status"] == "error"
    assert "aten::geqrf is not simulated: torch has no rule for the shapes" in run.cause
