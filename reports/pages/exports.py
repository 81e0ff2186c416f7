"""The ranked table in other formats: Markdown for people, JSON and CSV for scripts.

JSON and CSV have the raw figures under the names of `result.json`; Markdown shows the same as the page.
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpbench.base.reading import printable
from fsdpbench.reports.figures import flat
from fsdpbench.reports.pages import display, ranking
from fsdpbench.reports.pages.recommendation import best_sentence, findings
from fsdpbench.reports.pages.view import load_run


def write_markdown(run_dir: Path) -> str:
    """Return recommendation, findings and ranked table as GitHub Markdown. Raises `RunFolderError`."""
    view = load_run(run_dir)
    ranked = ranking.rank(view)
    rows = [entry.row for entry in ranked]
    varying = ranking.varying_settings(rows)
    shown = ranking.known_figures(ranked, ranking.metric_of(view))
    lines = [f"# {_escaped(view.title)}", "", f"**{_escaped(best_sentence(view))}**", ""]
    lines += [f"- {_escaped(finding)}" for finding in findings(view)]
    if view.simulated:
        lines.append("- Figures are simulated.")
    constants = ", ".join(f"{name}={value}" for name, value in ranking.constant_settings(rows).items())
    lines += [f"- The same everywhere: {_escaped(constants)}"] if constants else []
    lines += ["", _markdown_row(["#", *varying, "status", *(figure.name for figure in shown)])]
    lines.append(" ".join(["| --: |", *["--- |"] * (len(varying) + 1), *["--: |"] * len(shown)]))
    for entry in ranked:
        settings = [display.setting(entry.row.settings.get(name)) for name in varying]
        figures = [figure.text(figure.value(entry.row)) for figure in shown]
        place = str(entry.place or display.NOTHING)
        lines.append(_markdown_row([place, *settings, entry.row.status.words, *figures]))
    return "\n".join(lines) + "\n"


def write_json(run_dir: Path) -> str:
    """Return schema, recommendation, findings, metric, configurations. Raises `RunFolderError`."""
    view = load_run(run_dir)
    ranked = ranking.rank(view)
    content = {
        "schema": 1,
        "title": view.title,
        "recommendation": best_sentence(view),
        "findings": findings(view),
        "simulated": view.simulated,
        "metric": ranking.metric_of(view).field,
        "configurations": [_record(entry) for entry in ranked],
        "pending": list(view.pending),
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_csv(run_dir: Path) -> str:
    """Return one line per configuration: place, name, status, settings, figures. Raises `RunFolderError`."""
    ranked = ranking.rank(load_run(run_dir))
    names = list(dict.fromkeys(name for entry in ranked for name in entry.row.settings))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["place", "name", "key", "status", *names, *(figure.name for figure in flat()), "problem", "command"]
    )
    for entry in ranked:
        row = entry.row
        settings = [display.setting(row.settings[name]) if name in row.settings else "" for name in names]
        head = [entry.place or "", row.name, row.config.key, row.status.value]
        figures = [figure.of(row.result) for figure in flat()]
        cells = [*head, *settings, *figures, row.problem or "", row.command or ""]
        writer.writerow(map(_harmless, cells))
    return buffer.getvalue()


def _record(entry: ranking.Ranked) -> dict[str, object]:
    row = entry.row
    return {
        "place": entry.place,
        "name": row.name,
        "key": row.config.key,
        "folder": row.folder.name,
        "status": row.status.value,
        "compiled": row.compiled,
        "problem": row.problem,
        "settings": dict(row.settings),
        **{figure.name: figure.of(row.result) for figure in flat()},
        "of_best": entry.of_best,
        "command": row.command,
    }


def _harmless(cell: Any) -> Any:
    """Return the cell; if a spreadsheet would run it as a formula, quoted as text."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Return text for Markdown: one line, no markup, no HTML."""
    text = printable(" ".join(text.split()))
    for character in "\\`*_[]|":
        text = text.replace(character, f"\\{character}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
