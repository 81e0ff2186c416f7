"""Trees of modules, drawn as data, wrapped by torch's FSDP1 or ours; for tests of names.

A tree is wrapped node by node, by hand or by a policy, with activation checkpointing outside or inside of the
wrapper, with compiled parts, tied and ignored parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy as TorchCustomPolicy

from fsdpbench import impl

Draw = Any
CPU = torch.device("cpu")
WIDTH = 4


@dataclass(frozen=True)
class Node:
    """One module.

    Attributes:
        kind: ``linear``, ``batch`` (with buffers), ``own`` (a module with a parameter, a buffer and children)
            or ``sequence``.
        around: what wraps it, from the inside to the outside: ``fsdp``, ``checkpoint``, ``compile``.
        frozen: its own parameters need no gradient.
        ignored: it is one of the ``ignored_modules``; ``state``: its first parameter is of the
            ``ignored_states``.
        children: for ``own`` and ``sequence``.
    """

    kind: str = "linear"
    around: tuple[str, ...] = ()
    frozen: bool = False
    ignored: str = ""
    children: tuple[Node, ...] = ()

    def compiles(self) -> bool:
        """Whether it, or what is inside, is compiled."""
        return "compile" in self.around or any(child.compiles() for child in self.children)


@dataclass(frozen=True)
class Tree:
    """A root with settings that hold for all wrappers.

    Attributes:
        tied: the first two linear layers of one unit share their matrix, if there are two.
        uneven: sizes that no number of ranks divides, where some ranks have no elements.
        policy: ``fsdp`` in the nodes is done by a policy from the root.
        outer: the root stands in a plain module that is not wrapped.
        low: parameters are gathered in bfloat16.
    """

    root: Node = Node("own", ("fsdp",))
    strategy: str = "FULL_SHARD"
    originals: bool = False
    tied: bool = False
    uneven: bool = False
    policy: bool = False
    outer: bool = False
    low: bool = False

    def eager(self) -> Any:
        """Return a context in which compiled parts run as they are: only their names matter."""
        return torch.compiler.set_stance("force_eager") if self.root.compiles() else nullcontext()


# -- drawing -------------------------------------------------------------------------------------------------

WRAPPINGS = [
    (), ("fsdp",), ("fsdp",), ("checkpoint", "fsdp"), ("fsdp", "checkpoint"), ("checkpoint",), ("compile",),
    ("fsdp", "compile"), ("compile", "fsdp"), ("fsdp", "fsdp"),
]  # fmt: skip


def _rarely(value: st.SearchStrategy[Any], default: Any, odds: int = 6) -> st.SearchStrategy[Any]:
    return st.integers(0, odds - 1).flatmap(lambda n: value if n == odds - 1 else st.just(default))


@st.composite
def nodes(draw: Draw, depth: int) -> Node:
    kind = draw(st.sampled_from(["linear", "batch", *(["own", "own", "sequence"] if depth else [])]))
    inner = st.lists(nodes(depth - 1), min_size=1, max_size=3) if kind in ("own", "sequence") else st.just([])
    return Node(
        kind=kind,
        around=draw(st.sampled_from(WRAPPINGS)),
        frozen=draw(_rarely(st.just(True), False)),
        ignored=draw(_rarely(st.sampled_from(["module", "state"]), "", 8)),
        children=tuple(draw(inner)),
    )


@st.composite
def trees(draw: Draw, ranks: int) -> Tree:
    root = draw(nodes(2))
    around = root.around if "fsdp" in root.around else ("fsdp",)
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if ranks > 1:
        strategies += ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    return Tree(
        root=Node(root.kind, around, root.frozen, "", root.children),
        strategy=draw(st.sampled_from(strategies)),
        originals=draw(st.booleans()),
        tied=draw(_rarely(st.just(True), False, 3)),
        uneven=draw(_rarely(st.just(True), False, 3)),
        policy=draw(_rarely(st.just(True), False, 3)),
        outer=draw(_rarely(st.just(True), False, 3)),
        low=draw(_rarely(st.just(True), False, 4)),
    )


# -- building ------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A module with something of everything."""

    def __init__(self, width: int, children: list[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.parts = nn.ModuleList(children)
        self.bias = nn.Parameter(torch.zeros(width))
        self.sees: Callable[[str], None] = lambda phase: None
        """Called in forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        self.sees("in forward")
        y = x * self.weight * self.scale + self.bias
        if y.requires_grad:
            y.register_hook(lambda gradient: self.sees("in backward"))
        return y


class Plain(nn.Module):
    """What is not wrapped, around what is."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(self.before(x))
        return y


class Builder:
    """Builds a tree on one side, ``torch`` or ``impl``."""

    def __init__(self, side: str, tree: Tree) -> None:
        self.side, self.tree = side, tree
        self.api: Any = torch_fsdp if side == "torch" else impl
        self.width = 3 if tree.uneven else WIDTH
        self._ignored_modules: list[nn.Module] = []
        self._ignored_states: list[nn.Parameter] = []
        self._chosen: list[nn.Module] = []
        self._after: list[tuple[Node, nn.Module]] = []

    def build(self) -> nn.Module:
        torch.manual_seed(3)
        root = self._node(self.tree.root, is_root=True)
        if self.tree.outer:
            root = Plain(root, self.width)
        return root.train()

    def _node(self, node: Node, is_root: bool = False) -> nn.Module:
        children = [self._node(child) for child in node.children]
        made: nn.Module
        if node.kind == "linear":
            made = nn.Linear(self.width, self.width)
        elif node.kind == "batch":
            made = nn.BatchNorm1d(self.width)
        elif node.kind == "sequence":
            made = nn.Sequential(*children)
        else:
            made = Own(self.width, children)
        if self.tree.tied and children:
            linear = [m for m in made.modules() if type(m) is nn.Linear and "weight" in m._parameters]
            if len(linear) > 1 and all(not child.around and not child.ignored for child in node.children):
                linear[1].weight = linear[0].weight
        if node.frozen:
            for parameter in made.parameters(recurse=False):
                parameter.requires_grad_(False)
        if node.ignored == "module":
            self._ignored_modules.append(made)
        elif node.ignored == "state":
            self._ignored_states += list(made.parameters(recurse=False))[:1]
        for how in node.around:
            made = self._around(made, how, is_root)
        return made

    def _around(self, made: nn.Module, how: str, is_root: bool) -> nn.Module:
        if how == "checkpoint":
            return checkpoint_wrapper(made)
        if how == "compile" and self.tree.policy:
            return made  # a compiled module calls what it was made of, not what a policy puts in its place
        if how == "compile":
            return torch.compile(made, backend="eager")  # type: ignore[return-value]
        if self.tree.policy and not is_root:
            self._chosen.append(made)
            return made
        return self._wrap(made, is_root)

    def _wrap(self, made: nn.Module, is_root: bool) -> nn.Module:
        tree, arguments = self.tree, dict[str, Any]()
        inside = set(made.modules())
        modules = [module for module in self._ignored_modules if module in inside]
        # A module with a wrapper in it cannot be ignored.
        wrapper = self.api.FullyShardedDataParallel
        modules = [m for m in modules if not any(isinstance(inner, wrapper) for inner in m.modules())]
        if modules:
            arguments["ignored_modules"] = modules
        elif self._ignored_states:
            arguments["ignored_states"] = self._ignored_states
        if tree.policy and is_root:
            policy: Any = TorchCustomPolicy if self.side == "torch" else impl.CustomPolicy
            chosen = {id(module) for module in self._chosen}
            arguments["auto_wrap_policy"] = policy(lambda module: id(module) in chosen)
        if "HYBRID" in tree.strategy:
            arguments["device_mesh"] = mesh_of((1, 2))
        if tree.low:
            arguments["mixed_precision"] = self.api.MixedPrecision(param_dtype=torch.bfloat16)
        wrapped: nn.Module = wrapper(
            made,
            sharding_strategy=self.api.ShardingStrategy[tree.strategy],
            use_orig_params=tree.originals,
            device_id=CPU,
            **arguments,
        )
        return wrapped


_meshes: dict[tuple[int, ...], Any] = {}


def mesh_of(shape: tuple[int, ...]) -> Any:
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return _meshes[shape]
