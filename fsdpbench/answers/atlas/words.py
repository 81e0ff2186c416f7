"""Cells in words, for the terminal and the pages."""

from __future__ import annotations

import re
from pathlib import Path

from fsdpbench.answers.atlas import words
from fsdpbench.answers.atlas.lookup import Atlas, AtlasCell, Choice
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import GIB, percent
from fsdpbench.reports.pages.shell import write_page


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
    because = "; ".join(best.interval.because or ())
    shown += [f"  interval: 9 of 10 cases; less is known here: {because}"] * bool(because)
    shown += ["  risky: memory fits only inside the prediction's error; nothing else fits"] * best.risky
    shown += [f"  within 2 %: {settings_words(each)}: {rate_words(each)}" for each in cell.alternatives]
    shown += [f"  faster but risky: {settings_words(each)}: {rate_words(each)}" for each in cell.risky]
    return [*shown, f"  {best.command}"]


OVERVIEW = "index.html"


def write_pages(folder: Path, atlas: Atlas) -> Path:
    """Write overview and models' pages into `folder`; the overview's path."""

    def write(name: str, **about: object) -> Path:
        template, scripts = "answers/atlas/page.html.jinja", ("answers/atlas/page.js",)
        names = {"words": words, "display": display, "page_of": page_of, "overview": OVERVIEW}
        return write_page(
            folder / name, template, scripts=scripts, draws=False, atlas=atlas, **names, **about
        )

    for name in atlas.models:
        write(page_of(name), model=name, cells=[cell for cell in atlas.cells if cell.model == name])
    return write(OVERVIEW, model=None, cells=atlas.cells)


def page_of(model: str) -> str:
    """Return the file of a model's page."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', model)}.html"
