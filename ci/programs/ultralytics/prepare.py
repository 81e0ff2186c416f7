"""Make `data`: random images with four boxes each, and the file that describes them."""

from pathlib import Path

import numpy as np
from PIL import Image

drawn = np.random.default_rng(0)
for part, count in (("train", 256), ("val", 16)):
    images, labels = Path("data/images", part), Path("data/labels", part)
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(drawn.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(images / f"{number}.jpg")
        centres = drawn.uniform(0.3, 0.7, (4, 2))
        lines = (f"{drawn.integers(0, 4)} {x:.3f} {y:.3f} 0.2 0.2\n" for x, y in centres)
        (labels / f"{number}.txt").write_text("".join(lines))
names = "{0: a, 1: b, 2: c, 3: d}"
Path("data.yaml").write_text(
    f"path: {Path('data').resolve()}\ntrain: images/train\nval: images/val\nnames: {names}\n"
)
