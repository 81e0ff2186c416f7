"""Draws docs/images/fsdp-step.svg: the streams of one simulated FSDP step of four blocks.

python ci/docs/draw_step.py
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "fsdp-step.svg"
RUN = (
    "run --model gpt --shape layers=4,d_model=2560,heads=32,vocab=2560,tied=true,max_seq=2048 --gpus 8 "
    "--device sim --hardware a100-80gb --batch 2 -o"
)
ROWS = {"compute": "computation", "gather": "all-gather", "reduce": "reduce-scatter"}
COLOURS = ("#8a8f98", "#3b6fb6", "#2f9e77", "#c9822b", "#a04fa8")
LEFT, WIDTH, HEIGHT, TOP = 130, 1000, 36, 34

Span = tuple[str, str, float, float]


def events(folder: Path) -> list[dict[str, Any]]:
    """The device's kernels and annotated spans of the first traced step, in order."""
    (file,) = folder.glob("*/trace/rank0_trace.json.gz")
    content = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    spans = [each for each in content if each.get("cat") in ("gpu_user_annotation", "kernel")]
    (first, second, *_) = sorted(each["ts"] for each in spans if each["name"] == "FSDP::all_gather (root)")[
        ::2
    ]
    return sorted((each for each in spans if first <= each["ts"] < second), key=lambda each: each["ts"])


def spans_of(found: list[dict[str, Any]]) -> list[Span]:
    """(row, unit, start, end) in microseconds: collectives as they ran, computation from wait to wait."""
    result: list[Span] = []
    collectives = {"FSDP::all_gather": "gather", "FSDP::reduce_scatter": "reduce"}
    for each in found:
        event, _, unit = each["name"].partition(" (")
        if event in collectives and each["dur"] > 100:
            result.append((collectives[event], unit.rstrip(")"), each["ts"], each["ts"] + each["dur"]))
    waits = [each for each in found if each["name"].startswith("FSDP::wait_all_gather")]
    stream, reduced = waits[0]["tid"], max(end for row, _, _, end in result if row == "reduce")
    kernels = [each for each in found if each["cat"] == "kernel" and each["tid"] == stream]
    end = max(each["ts"] + each["dur"] for each in kernels if each["ts"] + each["dur"] < reduced)
    for each, following in zip(waits, [*waits[1:], None], strict=True):
        unit = each["name"].partition(" (")[2].rstrip(")")
        result.append(("compute", unit, each["ts"] + each["dur"], following["ts"] if following else end))
    return result


def draw(spans: list[Span]) -> str:
    """The picture as SVG; colours by unit."""
    begin, end = min(span[2] for span in spans), max(span[3] for span in spans)
    scale = WIDTH / (end - begin)
    units = sorted({unit for _, unit, *_ in spans}, key=lambda unit: (unit != "root", unit))
    height = TOP + len(ROWS) * (HEIGHT + 10) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img" '
        'font-family="sans-serif" font-size="14">',
        "<title>Streams of one FSDP step: computation, all-gather, reduce-scatter, by unit</title>",
        f'<rect width="{LEFT + WIDTH + 20}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (row, label) in enumerate(ROWS.items()):
        y = TOP + number * (HEIGHT + 10)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 23}" text-anchor="end" fill="#222">{label}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="#f1f2f4"/>')
        for kind, unit, start, stop in spans:
            if kind == row and stop > start:
                x, width = LEFT + (start - begin) * scale, max((stop - start) * scale, 1.5)
                colour = COLOURS[units.index(unit) % len(COLOURS)]
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{HEIGHT - 6}" '
                    f'fill="{colour}" stroke="#fff"/>'
                )
    for number, unit in enumerate(units):
        x, y = LEFT + number * 130, height - 26
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}" fill="#222">{unit}</text>')
    parts.append(
        f'<text x="{LEFT + WIDTH}" y="{height - 14}" text-anchor="end" fill="#555">'
        f"one step, {(end - begin) / 1000:.1f} ms, simulated (8 x A100-80GB)</text>"
    )
    parts.append(f'<text x="{LEFT}" y="20" fill="#222">forward, then backward in the opposite order →</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Run the step and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "fsdpbench", *RUN.split(), folder + "/run"], check=True)
        PICTURE.write_text(draw(spans_of(events(Path(folder) / "run"))), encoding="utf-8")


if __name__ == "__main__":
    main()
