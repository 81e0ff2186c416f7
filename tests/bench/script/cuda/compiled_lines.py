"""Programs of one line that ask for devices as scripts do, and what Dynamo makes of each.

python compiled_lines.py cpu [NAME ...]        prints a line each: graphs and breaks
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

D = sys.argv[1]

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arange": lambda x: x + torch.arange(x.shape[-1], device=x.device),
    "zeros": lambda x: x + torch.zeros(8, device=x.device, dtype=x.dtype),
    "zeros_str": lambda x: x + torch.zeros(8, device=D),
    "ones_pos": lambda x: x + torch.ones((8, 8), device=torch.device(D)),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "full": lambda x: torch.where(x > 0, x, torch.full((), 1.0, device=x.device)),
    "new_zeros": lambda x: x + x.new_zeros(8),
    "new_tensor": lambda x: x + x.new_tensor(3.0),
    "tensor": lambda x: x + torch.tensor(3.0, device=x.device),
    "to_dtype": lambda x: x.to(torch.bfloat16).float(),
    "to_dev": lambda x: x.to(x.device) * 2,
    "to_other": lambda x: x.to(x) * 2,
    "to_str": lambda x: x.to(D) * 2,
    "type": lambda x: x.type(torch.bfloat16) * 2,
    "type_as": lambda x: x.type_as(x) * 2,
    "is_cuda": lambda x: x * 2 if x.is_cuda else x * 3,
    "dev_type": lambda x: x * 2 if x.device.type == D else x * 3,
    "cuda()": lambda x: (x.cuda() if D == "cuda" else x.cpu()) * 2,
    "rand": lambda x: x + torch.rand(8, device=x.device),
    "randn_like": lambda x: x + torch.randn_like(x),
    "dropout": lambda x: F.dropout(x, 0.1),
    "autocast": lambda x: torch.autocast(D, torch.bfloat16)(lambda y: y @ y)(x),
    "autocast_devtype": lambda x: torch.autocast(x.device.type, torch.bfloat16)(lambda y: y @ y)(x),
    "empty_fill": lambda x: torch.empty(8, 8, device=x.device).fill_(1.0) + x,
    "tril": lambda x: x.masked_fill(
        torch.tril(torch.ones(8, 8, device=x.device)) == 0, float("-inf")
    ).softmax(-1),
    "tri_inf": lambda x: x + torch.triu(torch.full((8, 8), float("-inf"), device=x.device), 1),
    "linspace": lambda x: x + torch.linspace(0, 1, 8, device=x.device),
    "outer": lambda x: (
        x + torch.outer(torch.arange(8, device=x.device).float(), torch.arange(8, device=x.device).float())
    ),
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x * 2 if x.abs().sum() < 0 else x,
    "tolist": lambda x: x * x.sum().tolist(),
    "cpu": lambda x: x.cpu() * 2,
    "get_device": lambda x: x * (1 + x.get_device()),
    "print": lambda x: (print("p"), x * 2)[1],
    "eye": lambda x: x @ torch.eye(8, device=x.device),
    "as_tensor": lambda x: x + torch.as_tensor(2.0, device=x.device),
    "contiguous": lambda x: x.t().contiguous() + 1,
    "pin": lambda x: x + torch.arange(8).to(x.device, non_blocking=True),
    "dev_index": lambda x: x + (x.device.index or 0),
    "str_dev": lambda x: x * 2 if str(x.device).startswith(D) else x,
    "cuda_avail": lambda x: x * 2 if torch.cuda.is_available() else x * 3,
    "cuda_cap": lambda x: x * 2 if (D == "cpu" or torch.cuda.get_device_capability()[0] >= 8) else x * 3,
    "grad_enabled": lambda x: x * 2 if torch.is_grad_enabled() else x,
    "numel": lambda x: x / x.numel(),
    "embedding": lambda x: F.embedding(torch.arange(8, device=x.device), x),
    "one_hot": lambda x: x + F.one_hot(torch.arange(8, device=x.device), 8),
    "sdpa": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], is_causal=True
    )[0, 0],
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(8, 4, 2))
        * torch.polar(torch.ones(8, 4, device=x.device), torch.ones(8, 4, device=x.device))
    ).reshape(8, 8),
    "cumsum": lambda x: x.cumsum(0),
    "topk": lambda x: x.topk(2, -1)[0].sum(-1, keepdim=True) + x,
    "sort": lambda x: x.sort(-1)[0],
    "mod_device": lambda x: torch.nn.functional.layer_norm(x, (8,)),
    "repeat": lambda x: x[:, None].expand(8, 2, 8).reshape(16, 8)[:8],
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(8, device=x.device), x),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(
        0, torch.zeros(8, 8, dtype=torch.long, device=x.device), x
    ),
}


def told(program: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Graphs, breaks, and what it raised."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(8, 8, device=D, requires_grad=True)
    compiled = torch.compile(program, backend="eager")
    try:
        compiled(x)
        compiled(x).sum().backward()
    except Exception as error:
        return repr(error)
    return f"{counters['stats']['unique_graphs']} {sorted(counters['graph_break'].values())}"


for name in sys.argv[2:] or CASES:
    print("CASE", name, told(CASES[name]))
