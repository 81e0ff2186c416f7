"""Draws the gallery's pictures: makes each page with the command that the gallery names, and photographs it.

python ci/docs/draw_pages.py out-of-memory advice --made build/gallery    # all without names
python ci/docs/draw_pages.py trace --trace FILE                           # of a trace of another program
python ci/docs/draw_pages.py atlas --made runs                            # pages that are there stay

Pictures are reduced to 128 colours, so that each stays far below `MOST_BYTES`.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 300_000
COLOURS = 128


@dataclass(frozen=True)
class Picture:
    """One picture: the command that makes the page, where the page is, and the part that is shown."""

    command: str
    page: str
    width: int = 1280
    height: int = 760
    top: str | None = None
    """The element at the upper edge; None: the page's beginning."""


PICTURES = {
    "sweep": Picture("sweep --model gpt-2.8b --gpus 8 --device sim -o sweep", "sweep/report.html", 1200, 867),
    "out-of-memory": Picture(
        "explain --model gpt-2.8b --gpus 8 --device sim --system torch-fsdp2 --batch 24 -o oom.html",
        "oom.html",
        height=620,
    ),
    "advice": Picture(
        "run --script {root}/docs/examples/train_fsdp2.py --gpus 8 --advise -o advice", "advice/report.html"
    ),
    "trace": Picture("analyze {trace} -o trace.html", "trace.html", 1000, 640),
    "fsdp-paper": Picture(
        "reproduce fsdp-paper -o fsdp-paper", "fsdp-paper/fsdp-paper.html", 1100, 773, "#figure-6b"
    ),
    "atlas": Picture("atlas build --small -o atlas", "atlas/index.html"),
}
FILES = {"sweep": ROOT / "docs" / "report.png"}


def main() -> None:
    """Draw the pictures that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--made", type=Path, default=ROOT / "build" / "gallery", help="folder of the pages")
    parser.add_argument("--trace", type=Path, help="a trace of another program, for the picture `trace`")
    asked = parser.parse_args()
    names = asked.names or [name for name in PICTURES if name != "trace" or asked.trace]
    if unknown := set(names) - PICTURES.keys():
        parser.error(f"unknown pictures: {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    if "trace" in names and not asked.trace:
        parser.error("the picture `trace` needs a trace: --trace FILE")
    asked.made.mkdir(parents=True, exist_ok=True)
    for name in names:
        picture = PICTURES[name]
        if not (asked.made / picture.page).exists():
            words = picture.command.format(root=ROOT, trace=asked.trace and asked.trace.resolve()).split()
            subprocess.run([sys.executable, "-m", "fsdpbench", *words], cwd=asked.made, check=True)
        file = FILES.get(name, IMAGES / f"{name}.png")
        file.write_bytes(reduced(photograph(picture, asked.made)))
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


def photograph(picture: Picture, folder: Path) -> bytes:
    """The part of the page that `picture` names, as PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": picture.width, "height": picture.height})
        tab.goto((folder / picture.page).resolve().as_uri())
        tab.wait_for_timeout(1500)  # charts are drawn when they come into view
        if picture.top is not None:
            tab.locator(picture.top).evaluate("element => element.scrollIntoView({block: 'start'})")
            tab.wait_for_timeout(1000)
        taken = tab.screenshot()
        browser.close()
    return taken


def reduced(png: bytes) -> bytes:
    """The picture with few colours. Raises `SystemExit` if it is still too large for the repository."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    if out.tell() > MOST_BYTES:
        raise SystemExit(f"{out.tell():,} bytes are more than {MOST_BYTES:,}: show less of the page")
    return out.getvalue()


if __name__ == "__main__":
    main()
