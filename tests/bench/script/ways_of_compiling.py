"""Ways in which programs compile, and what Dynamo makes of each.

python ways_of_compiling.py cpu|cuda [NAME ...]        prints a line each: graphs, breaks, or what was raised
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

D = sys.argv[1]
WAYS: dict[str, Callable[[], Any]] = {}


def way(program: Callable[[], Any]) -> Callable[[], Any]:
    WAYS[program.__name__] = program
    return program


def compiled(model: Any = None, **options: Any) -> Any:
    """`torch.compile`; on the CPU without code, since Dynamo's part is what is compared."""
    if D == "cpu" and "backend" not in options:
        options["backend"] = "aot_eager_decomp_partition"
    return torch.compile(model, **options)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def block() -> Any:
    return Block().to(D)


def x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 64, device=D, requires_grad=True)


def trained(model: Any, *rows: int) -> None:
    for each in rows or (8, 8):
        model(x(each)).sum().backward()


@way
def no_grad() -> None:
    model = compiled(block())
    with torch.no_grad():
        model(x()), model(x())
    with torch.inference_mode():
        model(torch.randn(8, 64, device=D))
    trained(model)


@way
def eval_and_train() -> None:
    model = block()
    made = compiled(model)
    trained(made)
    model.eval()
    with torch.no_grad():
        made(x())
    model.train()
    trained(made)


@way
def backends() -> None:
    from torch._dynamo.backends.common import aot_autograd

    trained(torch.compile(block(), backend="eager"))
    trained(torch.compile(block(), backend="aot_eager"))
    trained(torch.compile(block(), backend=lambda gm, inputs: gm.forward))
    trained(torch.compile(block(), backend=aot_autograd(fw_compiler=lambda gm, inputs: gm)))


@way
def compiled_autograd() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        made = compiled(block())

        @compiled
        def step(x: torch.Tensor) -> None:
            made(x).sum().backward()

        step(x()), step(x())


@way
def dynamic() -> None:
    trained(compiled(block(), dynamic=True), 8, 16, 24)
    trained(compiled(block()), 8, 16, 24)
    trained(compiled(block(), dynamic=False), 8, 16, 24)


@way
def marked_dynamic() -> None:
    made = compiled(block())
    for rows in (8, 16):
        given = x(rows)
        torch._dynamo.mark_dynamic(given, 0)
        made(given).sum().backward()


@way
def past_the_limit() -> None:
    trained(compiled(block(), dynamic=False), *range(8, 20))


@way
def past_the_limit_whole() -> None:
    trained(compiled(block(), dynamic=False, fullgraph=True), *range(8, 20))


@way
def break_in_whole_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    compiled(program, fullgraph=True)(x())


@way
def item() -> None:
    @compiled
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if x.sum().item() > 1e9:
            return y * 2
        return y * 3

    given = torch.zeros(8, 8, device=D, requires_grad=True)
    program(given), program(given)


@way
def captured_item() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled(lambda x: x * x.sum().item())(x())


@way
def optimizer() -> None:
    model = block()
    adam = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    step = compiled(lambda: adam.step())
    for _ in range(3):
        trained(model, 8)
        step()
        adam.zero_grad()


@way
def optimizer_of_its_own() -> None:
    class Descent(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-0.1)

    model = block()
    descent = Descent(model.parameters(), {})
    step = compiled(lambda: descent.step())
    for _ in range(3):
        trained(model, 8)
        step()
        descent.zero_grad()


@way
def loss() -> None:
    made = compiled(F.cross_entropy)
    for _ in range(2):
        made(block()(x()), torch.zeros(8, dtype=torch.long, device=D)).backward()


@way
def whole_step() -> None:
    model = block()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @compiled
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        sgd.step()
        sgd.zero_grad()

    step(x()), step(x())


@way
def disabled_part() -> None:
    part = torch.compiler.disable(lambda x: x.sin())
    trained(compiled(lambda x: part(x * 2) + 1))


@way
def stances() -> None:
    made = compiled(block(), dynamic=False)
    with torch.compiler.set_stance("force_eager"):
        trained(made)
    trained(made)
    with torch.compiler.set_stance("eager_on_recompile"):
        trained(made, 16)


@way
def nested() -> None:
    trained(compiled(nn.Sequential(compiled(block()), compiled(block()))))
    trained(compiled(compiled(block())))


@way
def makes_its_own() -> None:
    compiled(lambda: torch.ones(8, 8, device=D) * 2 + 1)()


@way
def operators_of_its_own() -> None:
    @torch.library.custom_op(f"of_ways::twice_{D}", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: gradient * 2)
    trained(compiled(lambda x: twice(x) + 1, fullgraph=True))


@way
def function_of_its_own() -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * x.cos()

    trained(compiled(lambda x: Sine.apply(x) * 2, fullgraph=True))


@way
def checkpointed_outside() -> None:
    made = compiled(block())
    trained(functools.partial(checkpoint, made, use_reentrant=False))
    trained(functools.partial(checkpoint, made, use_reentrant=True))


@way
def checkpointed_inside() -> None:
    model = block()
    for reentrant in (False, True):
        trained(compiled(lambda x, r=reentrant: checkpoint(model, x, use_reentrant=r) + 1, fullgraph=True))


@way
def selected_operators() -> None:
    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model = block()
    trained(
        compiled(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts), fullgraph=True)
    )


@way
def transforms() -> None:
    compiled(torch.func.vmap(torch.func.grad(lambda x: x.sin().sum())), fullgraph=True)(x().detach())


@way
def two_devices() -> None:
    compiled(lambda x, y: x * 2 + y.to(x.device))(x(), torch.randn(8, 64))


def _region() -> None:
    part = torch.compiler.nested_compile_region(lambda x: F.gelu(x) + 1)
    torch.compile(lambda x: part(part(x)), fullgraph=True)(x())


def _suppressed() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        _region()


REFUSED: dict[str, Callable[[], None]] = {
    "region": _region,
    "cudagraphs": lambda: torch.compile(block(), backend="cudagraphs")(x()),
    "suppressed": _suppressed,
}


def told(program: Callable[[], None]) -> str:
    """Graphs and breaks, or what it raised."""
    torch._dynamo.reset()
    counters.clear()
    try:
        program()
    except Exception as error:
        words = str(error).strip().splitlines()[0] if str(error) else ""
        return f"raised {type(error).__name__}: {words}"
    return f"graphs {counters['stats']['unique_graphs']}, breaks {sorted(counters['graph_break'].values())}"


for name in sys.argv[2:] or WAYS:
    print("CASE", name, told({**WAYS, **REFUSED}[name]), flush=True)
model = block()  # a run that is measured has steps
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    trained(model, 8)
    sgd.step()
