"""Make a folder of small random images, two classes for training and validation."""

from pathlib import Path

import numpy as np
from PIL import Image

random = np.random.default_rng(0)
for split, images in (("train", 400), ("validation", 40)):
    for number in range(images):
        folder = Path("images", split, f"class{number % 2}")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (72, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
