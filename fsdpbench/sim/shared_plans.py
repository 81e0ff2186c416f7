"""Plans that configurations of one sweep leave for each other, since most of their calls are the same.

A plan follows from the operator, its call and what surrounds it (hardware, software, the number of ranks).
Finding it out takes torch's rules for the meta device, ten times as long as reading it. Of one sweep all runs
the same code, so that nothing else can differ.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

from fsdpbench.files.shared_log import add_record, records


class SharedPlans:
    """The plans in the log at `path`, and those that this process adds to it in the end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._surroundings: str | None = None
        self._known: dict[bytes, bytes] = {}
        self._made: dict[bytes, bytes] = {}

    def begin(self, surroundings: str | None) -> None:
        """A simulation starts. `surroundings`: all that plans depend on besides their calls; None: its plans
        are not shared.
        """
        self._known, self._made = {}, {}
        self._surroundings = surroundings
        if surroundings is None:
            return
        for record in records(self._path):
            where, plans = pickle.loads(record)
            if where == surroundings:
                self._known |= plans

    def find(self, operator: Any, call: tuple[Any, ...]) -> Any:
        """The plan of a call (a kernel's key), or None where it is not known."""
        found = self._known.get(_name(operator, call)) if self._known else None
        return None if found is None else pickle.loads(found)

    def add(self, operator: Any, call: tuple[Any, ...], plan: Any) -> None:
        """Keep a plan for others; what cannot be written down is not kept."""
        if self._surroundings is None:
            return
        try:
            self._made[_name(operator, call)] = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError):
            return

    def leave(self) -> None:
        """Let others have what was found out here."""
        if self._made:
            add_record(self._path, pickle.dumps((self._surroundings, self._made), pickle.HIGHEST_PROTOCOL))
            self._made = {}


def _name(operator: Any, call: tuple[Any, ...]) -> bytes:
    """What is in a call has a text that tells it from others; one with an address is never met again."""
    return hashlib.blake2b(f"{operator} {call!r}".encode(), digest_size=16).digest()
