"""What is held at the ends of steps, and what of it grows from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from fsdpbench.sim.account.category import layers_as_one
from fsdpbench.sim.account.places import Place

_MOST_PLACES = 5
_SETTLED_STEP = 2
"""After the second step an optimizer has its states and a loop what it keeps of the last step."""
_Where = tuple[str, str | None]


class Growth:
    """Bytes allocated at the end of each step; where what the settled steps added was allocated."""

    def __init__(self) -> None:
        self._at_ends: list[int] = []
        self._settled: dict[_Where, int] = {}
        self._last: dict[_Where, int] = {}

    def step_ended(self, live: Iterable[tuple[int, Place]]) -> None:
        """A step ends; `live`: size and place of every block in use."""
        sums: dict[_Where, int] = {}
        for size, place in live:
            where = (layers_as_one(place.module), place.line)
            sums[where] = sums.get(where, 0) + size
        self._at_ends.append(sum(sums.values()))
        if len(self._at_ends) == _SETTLED_STEP:
            self._settled = sums
        self._last = sums

    def to_dict(self) -> dict[str, Any]:
        """`per_step_bytes` is 0 unless every step since the second added memory."""
        steps = len(self._at_ends) - _SETTLED_STEP
        settled = self._at_ends[_SETTLED_STEP - 1 :]
        grows = steps > 0 and all(late > early for early, late in pairwise(settled))
        added = {where: size - self._settled.get(where, 0) for where, size in self._last.items()}
        ordered = sorted((item for item in added.items() if item[1] > 0), key=lambda item: -item[1])
        return {
            "at_step_ends_bytes": self._at_ends,
            "per_step_bytes": (settled[-1] - settled[0]) // steps if grows else 0,
            "where": [
                {"module": module, "line": line, "bytes": size}
                for (module, line), size in (ordered[:_MOST_PLACES] if grows else [])
            ],
        }
