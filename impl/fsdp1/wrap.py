"""Wrap policies, which choose the modules that become units, and the traversal that applies them.

A policy is either a function ``policy(module, recurse, nonwrapped_numel) -> bool``, called twice for each
module (whether to recurse, and whether to wrap the module), or an object with ``select(root, ignored)`` for
the whole tree. The traversal only *selects* modules; each front end wraps them itself.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..shared import error_text

# Modules to wrap, inner ones before outer ones, each with keyword arguments for its wrapper.
Selection = dict[nn.Module, dict[str, Any]]

PolicyFunction = Callable[..., bool]


class ModulePolicy(ABC):
    """A policy that selects modules of a whole tree."""

    @abstractmethod
    def select(self, root: nn.Module, ignored: set[nn.Module]) -> Selection:
        """Return the modules in ``root``, possibly including it, that become units."""


class ModuleWrapPolicy(ModulePolicy):
    """Select every module of the given classes.

    Raises:
        ValueError: no classes, or something that is not a class.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = _classes(module_classes, "ModuleWrapPolicy")

    def select(self, root: nn.Module, ignored: set[nn.Module]) -> Selection:
        return {m: {} for m in _post_order(root, ignored) if isinstance(m, self.module_classes)}

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Apply the policy as a function, so that it can be combined with other policies."""
        return recurse or isinstance(module, self.module_classes)


class CustomPolicy(ModulePolicy):
    """Select by ``lambda_fn(module)``: ``True``, ``False``, or arguments for this module's wrapper."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def select(self, root: nn.Module, ignored: set[nn.Module]) -> Selection:
        selection: Selection = {}
        for module in _post_order(root, ignored):
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(error_text("wrap.select", answer, type(module).__name__))
            if answer is not False:
                selection[module] = {} if isinstance(answer, bool) else answer
        return selection


class EveryKthPolicy(ModulePolicy):
    """Select the first of each ``k`` modules of the given classes, in the order of the tree."""

    def __init__(self, module_classes: Iterable[type[nn.Module]], k: int) -> None:
        self.module_classes = _classes(module_classes, "EveryKthPolicy")
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"EveryKthPolicy needs k of 1 or more, not {k!r}")
        self.k = k

    def select(self, root: nn.Module, ignored: set[nn.Module]) -> Selection:
        matching = [m for m in _post_order(root, ignored) if isinstance(m, self.module_classes)]
        return {m: {} for m in matching[:: self.k]}


# -- policies as functions -----------------------------------------------------------------------------------


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True, so that every module is a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Return True to recurse; otherwise return ``lambda_fn(module)``."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Return True to recurse; otherwise return whether ``module`` is one of ``transformer_layer_cls``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


# Modules that use their children's parameters without calling the children, so they must not be split.
SIZE_FORCED_LEAVES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})

# Containers without a forward.
SIZE_EXCLUDED: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Return whether at least ``min_num_params`` elements of ``module`` belong to no unit inside."""
    leaves = SIZE_FORCED_LEAVES if force_leaf_modules is None else force_leaf_modules
    excluded = SIZE_EXCLUDED if exclude_wrap_modules is None else exclude_wrap_modules
    large = nonwrapped_numel >= min_num_params
    if recurse:
        return large and not isinstance(module, tuple(leaves))
    return large and not isinstance(module, tuple(excluded))


def size_policy(min_num_params: int) -> PolicyFunction:
    """Return ``size_based_auto_wrap_policy`` with ``min_num_params`` set."""
    return functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)


# -- the traversal -------------------------------------------------------------------------------------------


def places_of(selection: Selection, root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the parents of each selected module below ``root``, with its name in each."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None and child in selection:
                places.setdefault(child, []).append((parent, name))
    return places


def select_modules(
    root: nn.Module, policy: ModulePolicy | PolicyFunction, ignored: set[nn.Module] | None = None
) -> Selection:
    """Return the modules inside ``root``, excluding it, that ``policy`` selects as units, inner ones first.

    This allows the same policies with ``fully_shard``: shard the returned modules, then the root.
    """
    ignored = ignored or set()
    if isinstance(policy, ModulePolicy):
        selection = policy.select(root, ignored)
        selection.pop(root, None)
        return selection
    if not callable(policy):
        raise TypeError(f"a wrap policy is a function or a ModulePolicy, not {policy!r}")
    selection = {}
    _ask(root, policy, ignored, selection, is_root=True, seen=set())
    return selection


def add_classes(
    selection: Selection,
    root: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    ignored: set[nn.Module],
    arguments: dict[str, Any],
) -> Selection:
    """Return ``selection`` plus all modules of ``kinds`` inside ``root`` with ``arguments``."""
    merged: Selection = {}
    for module in _post_order(root, ignored):
        if isinstance(module, kinds) and module is not root:
            merged[module] = {**selection.get(module, {}), **arguments}
        elif module in selection:
            merged[module] = selection[module]
    return merged


def _ask(
    module: nn.Module,
    policy: PolicyFunction,
    ignored: set[nn.Module],
    selection: Selection,
    *,
    is_root: bool,
    seen: set[nn.Module],
) -> int:
    """Apply ``policy`` to ``module`` and its descendants. Return how many of its elements units own now."""
    seen.add(module)
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = 0
    for child in module.children():
        if child not in ignored and child not in seen:
            taken += _ask(child, policy, ignored, selection, is_root=False, seen=seen)
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        selection[module] = {}
        return numel
    return taken


def _post_order(
    root: nn.Module, ignored: set[nn.Module], seen: set[nn.Module] | None = None
) -> Iterator[nn.Module]:
    seen = {root} if seen is None else seen
    for child in root.children():
        if child not in seen and child not in ignored:
            seen.add(child)
            yield from _post_order(child, ignored, seen)
    yield root


def _classes(given: Iterable[type[nn.Module]], owner: str) -> tuple[type[nn.Module], ...]:
    classes = tuple(given)
    if not classes or not all(isinstance(kind, type) for kind in classes):
        raise ValueError(f"{owner} needs at least one module class, not {classes!r}")
    return classes


# -- wrapping by hand ----------------------------------------------------------------------------------------

_wrapping: list[tuple[type[nn.Module], dict[str, Any]]] = []


@contextmanager
def enable_wrap(*, wrapper_cls: type[nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap(module)`` wrap with ``wrapper_cls`` and these arguments inside this context."""
    _wrapping.append((wrapper_cls, copy.copy(wrapper_kwargs)))
    try:
        yield
    finally:
        _wrapping.pop()


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` with the arguments of the innermost ``enable_wrap``; a no-op outside of one."""
    if not _wrapping:
        return module
    wrapper_cls, kwargs = _wrapping[-1]
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})
