"""Every name that a script can see of a model, as plain values; runs inside the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from differential.ranks.models import Model, plain_blocks
from torch import nn

Look = dict[str, Any]


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
    return {
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
        "attributes": [
            name for name in ("weight", "bias", "parts", "scale", "_flat_param") if hasattr(module, name)
        ],
    }


def found_by_name(module: nn.Module) -> Look:
    """What the modules, parameters and buffers are found by: names with and without wrappers."""
    look: Look = {}
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in module.named_buffers()]
    modules = [name for name, _ in module.named_modules()]
    for name in [*parameters, *map(plain, parameters), "weight", "_flat_param"]:
        look[f"get_parameter {name}"] = _found(module, "get_parameter", name)
    for name in [*modules, *map(plain, modules)]:
        look[f"get_submodule {name}"] = _found(module, "get_submodule", name)
    for name in [*buffers, *map(plain, buffers)]:
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


def names_seen(model: nn.Module, *, in_flight: bool) -> Look:
    """The names of a program's model and of what is inside, for comparing.

    Args:
        in_flight: between forward and backward, where torch's FSDP1 may show tensors that are no parameters.
    """
    seen: Look = {}
    for place, module in model.named_modules():
        names = names_of(module) if module is model else {"own": _own(module)}
        seen |= {f"names {key} of '{place}'": value for key, value in names.items()}
    return seen if in_flight else {**seen, **found_by_name(model)}


def _own(module: nn.Module) -> list[str]:
    return [
        name for call in (module.named_parameters, module.named_buffers) for name, _ in call(recurse=False)
    ]


@contextmanager
def watched(model: nn.Module) -> Iterator[Look]:
    """See the names while a forward runs inside: those of the model, and of each block while it runs."""
    seen: Look = {}
    plain_model = next(module for module in model.modules() if isinstance(module, Model))
    with ExitStack() as stack:
        for part in (*(block.down for block in plain_blocks(model)), plain_model.head):

            def look(*_: Any) -> None:
                seen[f"names in forward {len(seen)}"] = [name for name, _ in model.named_parameters()]

            stack.callback(part.register_forward_hook(look).remove)
        yield seen
