"""The configurations of a sweep that are recommended, as code to paste: torch's best and ours."""

from __future__ import annotations

from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.reports.pages import load_run
from fsdpbench.reports.pages.ranking import chosen, rank
from fsdpbench.sweep.snippets import snippets


def write_recommended(folder: Path) -> list[Path]:
    """Write `best_SYSTEM.py` of the configurations that the verdict names into `folder`, a run; the paths.
    What an earlier sweep left there goes."""
    for outdated in folder.glob("best_*.py"):
        outdated.unlink()
    found = chosen(rank(load_run(folder)))
    rows = [each.row for each in (found.torchs, found.ours) if each is not None]
    configs = [Config.from_dict(row.result.config or {}) for row in rows]
    paths = []
    for name, source in snippets(configs).items():
        write_whole(folder / name, source)
        paths.append(folder / name)
    return paths
