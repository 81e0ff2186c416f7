"""The report page: one HTML file that needs no network, from a `RunView` and its traces."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fsdpbench.base.reading import UnreadableError, read_bytes
from fsdpbench.reports.analysis.processes import Kept
from fsdpbench.reports.consistency import leaves
from fsdpbench.reports.pages import details as detailed
from fsdpbench.reports.pages import display, ranking
from fsdpbench.reports.pages.comparisons import fusion_table, sections
from fsdpbench.reports.pages.recommendation import best_lines, code_to_copy, findings, overview_chart
from fsdpbench.reports.pages.shell import ASSETS, LARGEST, is_made_from, write_page
from fsdpbench.reports.pages.view import Configuration, RunFolderError, RunView, Status, load_run
from fsdpbench.reports.readers.trace import VARIABLE


def write_report(
    run_dir: Path,
    out: Path | None = None,
    *,
    reload_s: int | None = None,
    known: detailed.Known | None = None,
    workers: detailed.Workers | None = None,
    kept: Kept | None = None,
) -> Path:
    """Write the page of a run folder to `out` (`run_dir/report.html`) if it is outdated; return its path.

    The file is written atomically; its links to traces are relative. Raises `RunFolderError` if `run_dir` is
    not a run folder, `OSError` if `out` cannot be written. reload_s: for a sweep in progress: the page says
    so, and reloads itself after this many seconds. known, workers, kept: as for `build_details`.
    """
    view = load_run(run_dir)
    target = out or run_dir / "report.html"
    key = None if reload_s else _key(view, target)
    if key is not None and is_made_from(target, key):
        return target  # complete, and made by the same code from the same content
    ranked, metric = ranking.rank(view), ranking.metric_of(view)
    rows = [entry.row for entry in ranked]
    varying = ranking.varying_settings(rows)
    details = detailed.build_details(ranked, varying, lambda row: _links(row, target), known, workers, kept)
    judged = details[0].verdict if details else None
    shown = frozenset(detail.folder for detail in details)
    return write_page(
        target,
        f"{ASSETS}/report.html.jinja",
        key=None if any(detail.content["warnings"] for detail in details) else key,
        title=view.title,
        reload_s=reload_s,
        facts=_facts(view, ranked),
        simulated=simulated_words(rows),
        lines=best_lines(view),
        overview=overview_chart(view, ranked, metric),
        code=code_to_copy(view, ranked[0].row.command if ranked and ranked[0].place else None),
        findings=findings(view),
        advice=judged.texts if judged and ranked[0].place else [],
        constants=list(ranking.constant_settings(rows).items()),
        ranking=ranking.RankingTable.of(ranked, varying, metric, shown, lambda row: _links(row, target)),
        decisions=detailed.decisions_table(rows),
        races=detailed.races(rows),
        fusion=fusion_table(ranked, varying, {detail.folder: detail.held for detail in details}),
        rank_differences=detailed.rank_differences(rows),
        charts=sections(ranked, varying, metric),
        details=details,
        environment=_environment(rows),
        sweep_toml=view.sweep_toml,
    )


_SOURCES = tuple(Path(__file__).parents[2] / room for room in ("base", "reports"))
_LIBRARIES = ("jinja2", "markupsafe", "msgspec", "numpy", "plotly", "scipy")


def _key(view: RunView, target: Path) -> str | None:
    """Return a hash of all inputs of the page of `view` at `target`: code, versions, files of the run, the
    paths of its links; None if a file cannot be read."""
    files = [path for room in _SOURCES for path in sorted(room.rglob("*.*")) if path.suffix != ".pyc"]
    files += [view.folder / "sweep.toml", *sorted(view.folder.glob("best_*.py"))]
    for row in view.configurations:
        files += [row.folder / "config.json", row.folder / "result.json", *row.traces]
    around = [platform.python_version(), *map(version, _LIBRARIES), os.environ.get(VARIABLE), view.title]
    around += [*map(str, files), *(str(_links(row, target)) for row in view.configurations)]
    digest = hashlib.sha256(json.dumps([around, view.pending, view.left_out]).encode())
    try:
        for path in files:
            digest.update(hashlib.sha256(read_bytes(path, LARGEST)).digest())
    except UnreadableError:
        return None
    return digest.hexdigest()


def simulated_words(rows: Sequence[Configuration]) -> str | None:
    """Return what is simulated, on which profile, from which source; None if nothing is simulated."""
    simulated = [row for row in rows if row.simulated]
    if not simulated:
        return None
    profiles: dict[str, str] = {}
    for row in simulated:
        name = str(row.hardware.get("name") or "")
        if name:
            profiles.setdefault(name, str(row.hardware.get("source") or "not stated"))
        if row.result.software:
            source = str(row.hardware.get("software_source") or "not stated")
            profiles.setdefault(f"software {row.result.software}", source)
    text = "; ".join(f"{name} (source: {source})" for name, source in profiles.items())
    doubts = dict.fromkeys(
        str(doubt) for row in simulated for doubt in (row.result.environment or {}).get("warnings") or ()
    )
    scope = f"{len(simulated)} of {len(rows)} configurations come"
    if len(simulated) == len(rows):
        scope = "Every figure on this page comes"
    how = "The FSDP code was run; time and memory were simulated."
    doubtful = f" Doubtful: {'; '.join(doubts)}." if doubts else ""
    return f"{scope} from simulated GPUs{f': {text}' if text else ''}. {how}{doubtful}"


def _facts(view: RunView, ranked: Sequence[ranking.Ranked]) -> list[tuple[str, str]]:
    """Return names and values of what was run, and on what; only values that all rows share."""
    rows = [entry.row for entry in ranked]

    def common(values: Sequence[Any]) -> Any:
        known = [value for value in values if value not in (None, "")]
        different = {json.dumps(value, sort_keys=True, default=str) for value in known}
        return known[-1] if len(different) == 1 else None

    configs = [row.config for row in rows if row.status is not Status.UNREADABLE]
    model, size = common([c.model for c in configs]), common([c.parameters for c in configs])
    gpus = common([c.gpus for c in configs])
    hardware = common([row.hardware.get("name") for row in rows])
    device = common([row.device for row in rows])
    facts = []
    if model:
        facts.append(("model", f"{model} ({display.parameters(size)} parameters)" if size else str(model)))
    if gpus:
        ranks = "ranks on CPU" if device == "cpu" else f"× {hardware}" if hardware else "GPUs"
        facts.append(("on", f"{gpus} {ranks}"))
    network = common([row.hardware.get("node_network") for row in rows])
    facts += [(name, str(value)) for name, value in (("device", device), ("network", network)) if value]
    finished = len(view.with_status(Status.OK))
    facts.append(("configurations", f"{len(rows)}, {finished} finished"))
    torch = common([_torch_version(row) for row in rows])
    if torch:
        facts.append(("torch", str(torch)))
    return facts


def _torch_version(row: Configuration) -> Any:
    environment = row.result.environment or {}
    versions = environment.get("versions")
    return (versions if isinstance(versions, Mapping) else environment).get("torch")


def _links(row: Configuration, target: Path) -> list[dict[str, str]]:
    """Return links to the configuration's files, relative to the page, so that the folder can be moved."""
    files = [
        *row.traces,
        *(row.folder / name for name in ("result.json", "config.json", "stdout.log", "stderr.log")),
    ]
    base = target.resolve().parent
    return [
        {"text": path.name, "href": quote(Path(os.path.relpath(path.resolve(), base)).as_posix(), safe="/.")}
        for path in files
        if path.is_file()
    ]


def _environment(rows: Sequence[Configuration]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return titles and pairs of name and value: the rows' environments and hardware, equal ones once."""
    groups = []
    for name, found in (
        ("Environment", [row.result.environment for row in rows if row.result.environment]),
        ("Hardware", [row.hardware for row in rows if row.hardware]),
    ):
        different = {json.dumps(mapping, sort_keys=True, default=str): mapping for mapping in found}
        for number, mapping in enumerate(different.values(), start=1):
            title = name if len(different) == 1 else f"{name} {number} of {len(different)}"
            groups.append((title, [(path, display.setting(value)) for path, value in leaves(mapping)]))
    return groups


RELOAD_S = 10
_LEAST_S = 5.0
_SHARE = 10
"""The page is written during at most 1 / `_SHARE` of the time: a large page takes seconds to write."""


class LivePage:
    """The page at `target` of the run in `folder`, updated while the run continues."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = target
        self._folder = folder
        self._known: detailed.Known = {}
        self._done: int | None = None
        self._not_before = 0.0

    def update(self, done: int, *, is_over: bool) -> bool:
        """Write the page if there are new results (`done`: their number), or if the run is over. Return
        whether it was written. Raises `OSError` if it cannot be."""
        now = time.monotonic()
        if not is_over and (done == self._done or now < self._not_before):
            return False
        try:
            reload_s = None if is_over else RELOAD_S
            write_report(self._folder, self.target, reload_s=reload_s, known=self._known)
        except RunFolderError:
            return False  # the folder is being created, or was removed
        took = time.monotonic() - now
        self._done, self._not_before = done, now + max(_LEAST_S, _SHARE * took)
        return True
