"""Cells in words, for the terminal and the pages."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from fsdpbench.answers.atlas import words
from fsdpbench.answers.atlas.lookup import Atlas, AtlasCell, Choice
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import GIB, percent
from fsdpbench.reports.pages.shell import own_file, policy


def settings_words(choice: Choice) -> str:
    """`FULL_SHARD, no recomputation, batch 8, eager`."""
    recomputed = {"none": "no recomputation", "op": "selective recomputation", "full": "full recomputation"}
    checkpointing = str(choice.settings.get("activation_checkpointing"))
    recomputation = recomputed.get(checkpointing, checkpointing)
    how = "compiled" if choice.settings.get("compile") else "eager"
    return f"{choice.settings.get('strategy')}, {recomputation}, batch {choice.settings.get('batch')}, {how}"


def rate_words(choice: Choice) -> str:
    """Tokens a second and GPU with their interval."""
    span = choice.interval.tokens_per_s_per_gpu
    text = f"{choice.tokens_per_s_per_gpu:,.0f}"
    return text if span is None else f"{text} ({span[0]:,.0f} to {span[1]:,.0f})"


def memory_words(choice: Choice) -> str:
    """GiB reserved with their interval."""
    if choice.peak_reserved_bytes is None:
        return "–"
    text, span = f"{choice.peak_reserved_bytes / GIB:.1f}", choice.interval.peak_reserved_bytes
    return text if span is None else f"{text} ({span[0] / GIB:.1f} to {span[1] / GIB:.1f})"


def status_words(atlas: Atlas, cell: AtlasCell) -> str:
    """Return the words for a cell without settings."""
    if cell.status == "failed":
        return f"not known: {cell.reason}"
    enough = [e.gpus for e in atlas.row(cell.model, cell.hardware) if e.best and e.gpus > cell.gpus]
    more = f"; it fits on {enough[0]}" if enough else ""
    return f"does not fit on {cell.gpus} GPUs{more}"


def lines(atlas: Atlas, cell: AtlasCell) -> list[str]:
    """Return the answer to `fsdpbench atlas show`."""
    head = f"{cell.model} on {cell.gpus} x {cell.hardware}, {atlas.system} (simulated)"
    if cell.best is None:
        return [head, status_words(atlas, cell), cell.reason or ""]
    best = cell.best
    shown = [
        head,
        f"  {settings_words(best)}, sequences of {best.settings.get('seq')}",
        f"  {rate_words(best)} tokens/s/GPU, step {best.step_time_s * 1e3:,.0f} ms, MFU {percent(best.mfu)}",
        f"  {memory_words(best)} GiB reserved",
    ]
    if best.interval.because:
        shown.append(f"  interval: 9 of 10 cases; wide: {'; '.join(best.interval.because)}")
    if best.risky:
        shown.append("  risky: memory fits only inside the prediction's error; nothing else fits")
    shown += [f"  within 2 %: {settings_words(each)}: {rate_words(each)}" for each in cell.alternatives]
    shown += [f"  faster but risky: {settings_words(each)}: {rate_words(each)}" for each in cell.risky]
    return [*shown, f"  {best.command}"]


OVERVIEW = "index.html"


def write_pages(folder: Path, atlas: Atlas) -> Path:
    """Write overview and models' pages into `folder`; the overview's path."""
    script = Markup(_own("page.js"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    common = {
        "atlas": atlas,
        "words": words,
        "display": display,
        "policy": policy(script),
        "css": Markup(own_file("pages/assets/report.css")),
        "script": script,
        "page_of": page_of,
        "overview": OVERVIEW,
    }
    template = environment.from_string(_own("page.html.jinja"))
    for name in atlas.models:
        cells = [cell for cell in atlas.cells if cell.model == name]
        write_whole(folder / page_of(name), template.render(**common, model=name, cells=cells))
    write_whole(folder / OVERVIEW, template.render(**common, model=None, cells=atlas.cells))
    return folder / OVERVIEW


def page_of(model: str) -> str:
    """Return the file of a model's page."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', model)}.html"


def _own(name: str) -> str:
    return resources.files("fsdpbench.answers.atlas").joinpath(name).read_text(encoding="utf-8")
