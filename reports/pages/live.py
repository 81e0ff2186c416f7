"""The page of a run that continues: rewritten as results arrive, each trace read once."""

from __future__ import annotations

import time
from pathlib import Path

from fsdpbench.reports.pages.details import Known
from fsdpbench.reports.pages.html import write_report
from fsdpbench.reports.pages.view import RunFolderError

RELOAD_S = 10
_LEAST_S = 5.0
_SHARE = 10
"""Writing takes a tenth of the time at most: a page of many configurations takes seconds."""


class LivePage:
    """The page at `target` of the run in `folder`."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = target
        self._folder = folder
        self._known: Known = {}
        self._done: int | None = None
        self._not_before = 0.0

    def update(self, done: int, *, is_over: bool) -> bool:
        """Write the page if there is something new (`done`: how many results there are), or it is the last
        time. Whether it was written. Raises `OSError` if it cannot be."""
        now = time.monotonic()
        if not is_over and (done == self._done or now < self._not_before):
            return False
        try:
            reload_s = None if is_over else RELOAD_S
            write_report(self._folder, self.target, reload_s=reload_s, known=self._known)
        except RunFolderError:
            return False  # just being made, or removed
        took = time.monotonic() - now
        self._done, self._not_before = done, now + max(_LEAST_S, _SHARE * took)
        return True
