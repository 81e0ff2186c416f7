"""Trees of modules, drawn as data, wrapped by torch's FSDP1 or ours; and every name that a script can see.

A tree is wrapped node by node, by hand or by a policy, with activation checkpointing outside or inside of the
wrapper, with compiled parts, tied and ignored parameters. Looks are plain values, so that two sides compare
by ``==``.
"""

from __future__ import annotations

from collections.abc import Callable
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
Look = dict[str, Any]
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


@dataclass(frozen=True)
class Tree:
    """A root with settings that hold for all wrappers.

    Attributes:
        tied: the first two linear layers of one unit share their matrix, if there are two.
        uneven: sizes that no number of ranks divides, where some ranks have no elements.
        policy: ``fsdp`` in the nodes is done by a policy from the root.
        outer: the root stands in a plain module that is not wrapped.
    """

    root: Node = Node("own", ("fsdp",))
    strategy: str = "FULL_SHARD"
    originals: bool = False
    tied: bool = False
    uneven: bool = False
    policy: bool = False
    outer: bool = False
    low: bool = False


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
    checkpointed = around.index("fsdp") < around.index("checkpoint") if "checkpoint" in around else False
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
        low=not checkpointed and draw(_rarely(st.just(True), False, 4)),
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
        self.after: Callable[[], None] = lambda: None
        """Called in the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        self.after()
        return x * self.weight * self.scale + self.bias


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
            linear = [m for m in made.modules() if type(m) is nn.Linear and isinstance(m.weight, nn.Parameter)]
            linear = [m for m in linear if "weight" in m._parameters and not hasattr(m.weight, "_fsdp_seen")]
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


# -- looking -------------------------------------------------------------------------------------------------


def plain(name: str) -> str:
    for part in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{part}.", "")
    return name


def _found(module: nn.Module, call: str, name: str) -> str:
    try:
        found = getattr(module, call)(name)
    except AttributeError:
        return "AttributeError"
    return f"{type(found).__name__} {tuple(found.shape)}" if call == "get_buffer" else call


def names_of(module: nn.Module) -> Look:
    """Every name that ``module`` lists, in its order, however it is asked."""
    parameters, buffers, modules = module.named_parameters, module.named_buffers, module.named_modules
    look: Look = {
        "parameters": [name for name, _ in parameters()],
        "parameters twice": [name for name, _ in parameters(remove_duplicate=False)],
        "parameters of its own": [name for name, _ in parameters(recurse=False)],
        "parameters with a prefix": [name for name, _ in parameters("some.prefix")],
        "buffers": [name for name, _ in buffers()],
        "buffers twice": [name for name, _ in buffers(remove_duplicate=False)],
        "buffers of its own": [name for name, _ in buffers("some", recurse=False)],
        "modules": [(name, type(each).__name__) for name, each in modules()],
        "modules twice": [name for name, _ in modules(prefix="some", remove_duplicate=False)],
        "children": [name for name, _ in module.named_children()],
        "attributes": [name for name in ("weight", "bias", "parts", "scale", "_flat_param") if hasattr(module, name)],
    }
    for name in [*look["parameters twice"], *map(plain, look["parameters twice"]), "weight", "_flat_param"]:
        look[f"get_parameter {name}"] = _found(module, "get_parameter", name)
    for name, _ in [*look["modules"], *((plain(name), "") for name, _ in look["modules"])]:
        look[f"get_submodule {name}"] = _found(module, "get_submodule", name)
    for name in [*look["buffers"], *map(plain, look["buffers"])]:
        look[f"get_buffer {name}"] = _found(module, "get_buffer", name)
    return look


def forms_of(module: nn.Module) -> Look:
    """What is behind each name: shapes, dtypes, what is trained, and which are one object."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first: dict[int, int] = {}
    numbers = {name: first.setdefault(id(parameter), len(first)) for name, parameter in parameters.items()}
    return {
        "forms": {
            name: (tuple(p.shape), str(p.dtype), p.requires_grad, isinstance(p, nn.Parameter), numbers[name])
            for name, p in parameters.items()
        },
        "buffer forms": {name: (tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers()},
    }
