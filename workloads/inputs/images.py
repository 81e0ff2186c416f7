"""Input data of vision models: seeded synthetic images, or a folder with one subfolder of images a class.

    folder/cat/1.jpg  folder/cat/2.png  folder/dog/1.jpg        classes in the order of their names

Reading images takes the package `pillow` (the extra `vision`); synthetic ones take nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fsdpbench.workloads.base import Batch
from fsdpbench.workloads.inputs.streaming import check_counts, draw, rank_generator, reason_of, stream
from fsdpbench.workloads.tensor_plan import DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
CHANNELS = 3
# A GPU eats images faster than one process decodes them.
_CUDA_READERS = 4


def image_batches(
    *,
    image: int,
    classes: int,
    batch: int,
    seed: int,
    rank: int,
    device: torch.device | str,
    data: Path | None,
    world_size: int | None,
) -> Iterator[Batch]:
    """Endless (images, labels): float32 of [batch, 3, image, image] from -1 to 1, and int64 of [batch].

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ImageFolder`.
    """
    check_counts(batch, rank)
    target = torch.device(device)
    if data is None:
        batches = _synthetic(image, classes, batch, seed, rank, target)
    else:
        folder = ImageFolder(data, image, classes)
        batches = stream(
            folder,
            len(folder),
            data,
            batch=batch,
            seed=seed,
            rank=rank,
            world_size=world_size,
            device=target,
            workers=_CUDA_READERS if target.type == "cuda" else 0,
        )
    return ((images.to(target), labels.to(target)) for images, labels in batches)


def _synthetic(
    image: int, classes: int, batch: int, seed: int, rank: int, target: torch.device
) -> Iterator[Batch]:
    generator = rank_generator(seed, rank)
    shape = (batch, CHANNELS, image, image)

    def pixels() -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu").mul_(2).sub_(1)

    while True:
        yield (
            draw(pixels, shape, torch.float32, target),
            torch.randint(classes, (batch,), generator=generator, device="cpu"),
        )


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images below one subfolder a class, each scaled so that its shorter side fits and cut to its middle.

    Raises:
        DataError: pillow is missing, the folder is missing or holds no images, or it has more classes than
            the model; when an item is read, also that its file is not an image.
    """

    def __init__(self, folder: Path, image: int, classes: int) -> None:
        _pillow()
        if not folder.is_dir():
            raise DataError(
                f"cannot read images from {folder}: it must be a folder with one subfolder a class"
            )
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if len(names) > classes:
            raise DataError(
                f"{folder} has {len(names)} classes, the model {classes}: give --shape classes={len(names)}"
            )
        self._files = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self._files:
            raise DataError(
                f"{folder} holds no images: there must be one subfolder a class, with files "
                f"{', '.join(sorted(SUFFIXES))}"
            )
        self._image = image

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, label = self._files[index]
        return read_image(path, self._image), torch.tensor(label, device="cpu")


def read_image(path: Path, side: int) -> Tensor:
    """The middle square of an image, float32 of [3, side, side] from -1 to 1.

    Raises:
        DataError: the file is not an image that pillow can read.
    """
    pillow = _pillow()
    try:
        with pillow.open(path) as picture:
            whole = picture.convert("RGB")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the image {path}: {reason_of(error)}") from error
    edge = min(whole.size)
    left, top = ((length - edge) // 2 for length in whole.size)
    square = whole.resize(
        (side, side), resample=pillow.Resampling.BILINEAR, box=(left, top, left + edge, top + edge)
    )
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
    return pixels.view(side, side, CHANNELS).permute(2, 0, 1).float().div_(127.5).sub_(1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "reading images takes the package pillow: pip install 'fsdpbench[vision]', or leave --data out "
            "for synthetic images"
        ) from error
    return Image
