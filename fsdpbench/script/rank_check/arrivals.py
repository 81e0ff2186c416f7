"""Files that rank 0 saved, for the ranks that run after it: there from the next collective on.

    rank 0    save   barrier   load            rank 0's layer of files: files/home/me/step-3/…
    rank 1           barrier   load            after the barrier the same file is in its own layer

They are linked, not copied (they are as large as real checkpoints); what a rank writes itself takes their
place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fsdpbench.script.files.overlay import Overlay

Count = tuple[int, int]
"""How many collectives a rank has called: of the group of all ranks, and in all."""


class Arrivals:
    """Files on their way to this rank's `overlay` from the layer of rank 0 in `root`. `placed`: when rank 0
    wrote them."""

    def __init__(self, overlay: Overlay, root: Path, placed: Mapping[str, Count]) -> None:
        self._overlay = overlay
        self._root = str(root)
        self._waiting = sorted(self._found(placed).items(), key=lambda item: item[1])

    def arrive(self, count: Count) -> None:
        """Link what rank 0 had written before it called as much as this rank has by now."""
        still = []
        for path, then in self._waiting:
            if count[0] > then[0] or count[1] > then[1]:
                self._overlay.link(self._root + path, path)
            else:
                still.append((path, then))
        self._waiting = still

    def _found(self, placed: Mapping[str, Count]) -> dict[str, Count]:
        """All files of rank 0's layer. One that came there with its folder counts as that folder's first."""
        of_folder: dict[str, Count] = {}
        for path, count in placed.items():
            folder = os.path.dirname(path)
            of_folder[folder] = min(count, of_folder.get(folder, count))
        found = {}
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(folder, name).removeprefix(self._root)
                then = placed.get(path) or of_folder.get(os.path.dirname(path))
                if then is not None and not name.startswith(".gone."):
                    found[path] = then
        return found
