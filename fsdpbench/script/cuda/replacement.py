"""Functions of torch replaced wherever torch holds them.

`from x import f` copies a name: replacing `x.f` alone would leave the copy. All that is to be replaced is
collected first, then one walk through torch's modules replaces every name for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fsdpbench.sim.patches.torchscript import stand_in_for_builtin
from fsdpbench.torch_internals import IN_ITS_PLACE, expect, gone


class Replacements:
    """What is to be replaced by what."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def add(self, original: Any, replacement: Any) -> None:
        """`replacement` instead of `original`, in every module of torch."""
        self._by_id[id(original)] = (original, replacement)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """`wrapper(f)` instead of the function f that `owner` has under `name`. Raises `TorchInternalError`
        if it has none."""
        original = expect(owner, name)
        self.add(original, wrapper(original))

    def apply(self, also: tuple[str, ...] = ()) -> None:
        """Replace all that was added, also in this project's FSDP, which may be imported already, and in the
        modules whose names begin with one of `also`. Raises `TorchInternalError` for what no module of torch
        holds: its replacement would not be called."""
        prefixes = ("torch.", "fsdpbench.impl.", *also)
        met = set()
        for name, module in list(sys.modules.items()):
            if module is None or not f"{name}.".startswith(prefixes):
                continue
            for attribute, value in list(vars(module).items()):
                found = self._by_id.get(id(value))
                if found is not None:
                    setattr(module, attribute, found[1])
                    met.add(id(value))
        for original, _ in (found for key, found in self._by_id.items() if key not in met):
            raise gone(getattr(original, "__qualname__", repr(original)), IN_ITS_PLACE)
        for original, replacement in self._by_id.values():
            stand_in_for_builtin(original, replacement)
