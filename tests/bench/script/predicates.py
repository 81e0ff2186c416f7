"""Asks torch's public predicates, eager and in compiled code; prints one line for each: name, answers.

python predicates.py cpu | cuda
"""

from __future__ import annotations

import inspect
import json
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

DEVICE = sys.argv[1]
BEGIN = ("is_", "has_", "get_", "can_", "are_", "current_", "device_")
END = ("_enabled", "_available", "_count", "_supported", "_capability", "_allowed", "_built", "_preferred")
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def predicates() -> Iterator[tuple[str, Any]]:
    """Functions whose names ask something, of torch, torch.cuda, torch.accelerator and torch.backends."""
    backends = [name for name in sorted(sys.modules) if name.startswith("torch.backends")]
    for name in ("torch", "torch.cuda", "torch.accelerator", "torch.amp", *backends):
        module = sys.modules[name]
        if isinstance(module, types.ModuleType):
            for asked, function in sorted(vars(module).items()):
                asks = asked.startswith(BEGIN) or (
                    asked.endswith(END) and not asked.startswith(("_", "set_"))
                )
                if asks and callable(function) and not inspect.isclass(function):
                    yield f"{name}.{asked}", function


def ask(function: Any, args: tuple[Any, ...]) -> str:
    """Call it as eager code does."""
    answer = function(*args)
    if not isinstance(answer, PLAIN) and not (
        isinstance(answer, (list, tuple)) and all(isinstance(each, PLAIN) for each in answer)
    ):
        raise TypeError("no plain answer")
    return repr(answer)


def compiled(function: Any, args: tuple[Any, ...], fullgraph: bool) -> str:
    """Return the answer in compiled code; without `fullgraph` the graph may break there."""
    torch._dynamo.reset()

    def asking(y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        answer = function(*args)
        return y + 1, answer

    try:
        return repr(torch.compile(asking, fullgraph=fullgraph, backend="eager")(x)[1])
    except Exception as error:
        return f"raises {type(error).__name__}"


warnings.simplefilter("ignore")
x = torch.zeros(4, device=DEVICE)
for name, function in predicates():
    for words, args in {"": (), "device": (DEVICE,), "tensor": (x,)}.items():
        try:
            eager = ask(function, args)
        except Exception:
            continue
        answers = [eager, compiled(function, args, fullgraph=False), compiled(function, args, fullgraph=True)]
        print("ASKED", json.dumps([f"{name}({words})", *answers]))
