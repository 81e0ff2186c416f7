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


def test_a_module_that_is_moved_keeps_its_parameters(run_probe: RunScript) -> None:
    """As between CPU and CUDA: an optimizer made before, tied weights, hooks and gradients are its own."""
    run = run_probe(
        """
        seen = []
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.head = torch.nn.Embedding(1000, 512), torch.nn.Linear(512, 1000, bias=False)
                self.head.weight = self.table.weight
                self.norm = torch.nn.LayerNorm(512)
            def forward(self, x):
                return self.head(self.norm(self.table(x)))
        model = Tied()
        before = [*model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())
        model.table.weight.register_hook(lambda gradient: seen.append("hook"))
        model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("post"))
        for move in (model.cuda, lambda: model.to("cuda:0", torch.float32), model.cpu, model.cuda):
            move()
            assert all(one is other for one, other in zip(before, model.parameters(), strict=True)), move
        assert model.head.weight is model.table.weight and len(before) == 3
        assert torch.cuda.memory_allocated() == 1000 * 512 * 4 + 2 * 512 * 4
        for _ in range(3):
            model(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
            optimizer.step()
        assert sorted(seen) == 3 * ["hook"] + 3 * ["post"] and len(optimizer.state) == 3
        model.cpu()
        assert {each.grad.device.type for each in before} == {"cpu"}
        model.cuda()
        assert {each.grad.device.type for each in before} == {"cuda"}
        meta = torch.nn.Linear(8, 8, device="meta")
        made = meta.weight
        assert meta.to_empty(device="cuda").weight is not made, "torch makes a new parameter here"
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert run.result["script"]["observed"]["gradients"]["findings"] == []


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
    run = run_probe("torch.histogram(torch.ones(4, device='cuda'), 3)")
    assert run.result["status"] == "error"
    assert "aten::histogram is not simulated: torch has no rule for the shapes" in run.cause


def test_a_followed_tensor_has_the_methods_of_a_plain_one(run_probe: RunScript) -> None:
    """Every public method, with and without an argument, on what came from the device and on what did not."""
    run = run_probe(
        """
        import copy, pickle, warnings
        warnings.simplefilter("ignore")
        number = torch.zeros((), device="cuda").item()
        into = torch.zeros(3)
        into[0] = number
        pairs = (
            (lambda: torch.zeros(()), lambda: torch.zeros((), device="cuda").cpu()),
            (lambda: torch.zeros(()), lambda: torch.tensor(number)),
            (lambda: torch.zeros(()), lambda: into.mean()),
            (lambda: torch.zeros(3), lambda: torch.zeros(3, device="cuda").to("cpu")),
            (lambda: torch.zeros(2, 2).long(), lambda: torch.zeros(2, 2, device="cuda").long().cpu()),
        )
        names = [each for each in dir(torch.Tensor) if not each.startswith("_") and each != "set_"]
        names += ["__format__", "__repr__", "__str__", "__len__", "__iter__", "__bool__", "__array__"]
        functions = [copy.copy, copy.deepcopy, pickle.dumps, str, repr, torch.nn.Parameter, torch.stack]

        def kind(ask):
            try:
                found = ask()
            except Exception as error:
                return type(error)
            if isinstance(found, torch.Tensor):
                return found.shape, found.dtype, found.is_leaf, found._is_view() and found.dim()
            return next(each for each in type(found).__mro__ if not each.__module__.startswith("fsdpbench"))

        def called(owner, name, *given):
            found = getattr(owner, name)
            return found(*given) if callable(found) else found

        differ = []
        for plain, followed in pairs:
            for name in names:
                for given in ((), (0,), (".3f",)):
                    one, other = (kind(lambda: called(make(), name, *given)) for make in (plain, followed))
                    differ += [(name, given, one, other)] * (one != other)
            for function in functions:
                one, other = (kind(lambda: function(make())) for make in (plain, followed))
                differ += [(function, one, other)] * (one != other)
            assert str(followed()) == str(plain())
        assert not differ, differ
        print(f"{into.mean():.4f} {pairs[0][1]():8.3e}")
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert "0.0000 0.000e+00" in run.output
