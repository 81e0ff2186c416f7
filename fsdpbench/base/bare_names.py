"""Bare names of the packages: from the repository's root, `import impl` gets `fsdpbench.impl`.

Installed, all is in the package `fsdpbench`; in the repository three folders are beside it, with links::

    fsdpbench/impl -> ../impl        one folder, two ways to it, one set of module objects

A folder whose `__init__` finds itself imported under its bare name calls `stand_for`. Both names, and those
of all submodules, then mean the same module objects, so that no class exists twice. A user's own `impl.py` or
`workloads.py` is not touched: it is another file.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]


def stand_for(name: str) -> None:
    """Let the top-level `name`, which is being imported, mean this project's package of that name."""
    sys.modules[name] = importlib.import_module(f"{_PACKAGE}.{name}")
    if not any(isinstance(finder, _BareNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BareNames())


class _BareNames(MetaPathFinder, Loader):
    """A finder of `impl.a.b` as the module `fsdpbench.impl.a.b`, where `impl` means `fsdpbench.impl`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        owner = sys.modules.get(top)
        if not rest or owner is None or owner.__name__ != f"{_PACKAGE}.{top}":
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{_PACKAGE}.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing again, and give the module back the spec that the import system has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
