"""FlexAttention in compiled graphs: one operator, in the place of the template that Inductor would tune.

The program's own `mask_mod`, asked at a grid of positions, says which part of the score matrix is computed.
Tensors that it captures have no values here and count as zeros: documents are as long as the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from fsdpbench.base.torch_internals import flex_permute_strides, unset_fake_temporarily

_POINTS = 512
"""Positions of queries and of keys at which a mask is asked."""
_BLOCK = 128
"""Rows and columns of a block, which is computed if the mask leaves anything of it (torch's default)."""
_FORWARD = (
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] captured, float density)"
    " -> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor grad, Tensor[] captured,"
    " float density) -> Tensor[]"
)
_LIBRARIES: list[torch.library.Library] = []


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    density: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, and the logarithms of sums and maxima of each row's scores."""
    rows = [query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2)]
    return flex_permute_strides(query.new_empty((*query.shape[:3], value.shape[3])), query.stride()), *rows


def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    captured: Sequence[torch.Tensor],
    density: float,
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys, values and captured tensors."""
    made = [flex_permute_strides(each.new_empty(each.shape), each.stride()) for each in (query, key, value)]
    return made + [torch.empty_like(each, memory_format=torch.contiguous_format) for each in captured]


def _register() -> None:
    """Define both operators."""
    library = torch.library.Library("fsdpbench", "FRAGMENT")
    _LIBRARIES.append(library)
    library.define(_FORWARD)
    library.define(_BACKWARD)
    library.impl("flex_attention", _forward, "Meta")
    library.impl("flex_attention_backward", _backward, "Meta")
    ours: Any = torch.ops.fsdpbench
    register_flop_formula(ours.flex_attention)(
        lambda query, key, value, *rest, **about: sdpa_flop_count(query, key, value)
    )
    register_flop_formula(ours.flex_attention_backward)(
        lambda query, key, value, grad, *rest, **about: sdpa_backward_flop_count(grad, query, key, value)
    )


# On import: code that an earlier process compiled and cached calls them without a graph to replace them in.
_register()


def replace_flex_attention(gm: torch.fx.GraphModule) -> None:
    """Put the operators in the place of FlexAttention's nodes in a graph, in place."""
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name not in ("flex_attention", "flex_attention_backward"):
            continue
        backward = name.endswith("backward")
        query, key, value = node.args[:3]
        mask: Any = node.args[9 if backward else 4]
        given, of_mask = node.args[-2:]
        density = _density(gm, mask, of_mask, query, key)
        captured = [each for each in given if isinstance(_meta(each), torch.Tensor)]
        grad = (node.args[5],) if backward else ()
        ours: Any = torch.ops.fsdpbench
        operator = (ours.flex_attention_backward if backward else ours.flex_attention).default
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(operator, (query, key, value, *grad, captured, density))
        made.meta = dict(node.meta)
        for user in list(node.users) if backward else ():
            for part in list(user.users) if user.args[1] == 3 else ():  # the gradients of captured tensors
                part.args = (made, 3 + part.args[1])
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


def _meta(argument: Any) -> Any:
    """Return the fake value of a node's argument; None for anything else."""
    return getattr(argument, "meta", {}).get("val")


def _density(gm: Any, mask: Any, captured: Sequence[Any], query: torch.fx.Node, key: torch.fx.Node) -> float:
    """Return the share of the score matrix that a mask leaves."""
    lengths = [int(node.meta["val"].shape[2]) for node in (query, key)]
    with unset_fake_temporarily(), torch.device("cpu"):
        rows, columns = (torch.linspace(0, n - 1, min(n, _POINTS)).long() for n in lengths)
        others = [
            torch.zeros([int(n) for n in meta.shape], dtype=meta.dtype)
            if isinstance(meta := _meta(each), torch.Tensor)
            else each
            for each in captured
        ]
        zero = torch.zeros((), dtype=torch.long)
        asked = getattr(gm, mask[-1].target)
        for node in asked.graph.nodes:
            node.kwargs = {**node.kwargs, **({"device": zero.device} if "device" in node.kwargs else {})}
        asked.recompile()
        allowed = asked(zero, zero, rows[:, None], columns[None, :], *others)
        blocks = [(each // _BLOCK).unique(return_inverse=True)[1] for each in (rows, columns)]
        computed = torch.zeros([int(each.max()) + 1 for each in blocks])
        places = blocks[0][:, None], blocks[1][None, :]
        computed.index_put_(places, allowed.expand(len(rows), len(columns)).float(), accumulate=True)
        return float((computed > 0).float().mean()) or 1 / prod(lengths)
