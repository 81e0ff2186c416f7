"""Input data of models: seeded synthetic microbatches, or microbatches read from disk.

    tokens    drawn uniformly    or windows of a file's bytes
    images    drawn uniformly    or a folder with one subfolder of images per class:
                                 folder/cat/1.jpg  folder/dog/1.jpg     classes in order of their names
    clicks    drawn uniformly    or a log: lines `label <tab> numbers ... <tab> categories ...`, like Criteo's

Data on disk is divided among the ranks and streamed by a `DataLoader`. Reading images requires the package
`pillow` (the extra `vision`).
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fsdpbench.workloads.shape import CHANNELS, DataError, WorkloadError, error_text

Batch = tuple[Tensor, ...]
"""Arguments of one forward: the inputs, then the targets."""

BYTE_VALUES = 256
_START_TOKEN = 0
"""First input of a decoder that has an encoder; T5 starts with its padding token."""
IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# A GPU consumes images faster than one process can decode them.
_CUDA_READERS = 4
# Separates the random streams of neighbouring seeds and ranks: (0, 1) differs from (1, 0).
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Feed:
    """Source of one rank's microbatches: their size, random stream or data, and device.

    Fields: `batch`: samples per microbatch; `seed` and `rank` select the random stream; `data`: a file or
    folder to read, or None for synthetic data; `world_size`: ranks among which `data` is divided, or None if
    rank 0 runs alone.

    Raises:
        WorkloadError: `batch` is below 1, or `rank` below 0.
    """

    batch: int
    seed: int
    rank: int
    device: torch.device
    data: Path | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("batch", self.batch, 1), ("rank", self.rank, 0)):
            if value < least:
                raise WorkloadError(f"{name} is {value}: it must be at least {least}")

    @property
    def shares(self) -> int:
        """Return the number of ranks among which `data` is divided.

        Raises:
            WorkloadError: `rank` is outside that number, or the number is unknown.
        """
        if self.world_size is None:
            if self.rank > 0:
                raise WorkloadError(error_text("inputs.world_size", self.rank, self.data))
            return 1
        if self.rank >= self.world_size:
            raise WorkloadError(f"rank is {self.rank}: it must be less than world_size, {self.world_size}")
        return self.world_size

    def host_options(self) -> Mapping[str, Any]:
        """Return options with which torch's random functions draw on the CPU, from a stream of this seed and
        rank alone."""
        stream = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + self.rank)
        return {"generator": stream, "device": "cpu"}

    def draw(self, values: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return `values()`, a host tensor of `shape` and `dtype` that will be copied to the device.

        Simulated devices keep no values, so none are drawn for them: memory that is never written costs
        nothing, however large the batch.
        """
        return torch.empty(shape, dtype=dtype, device="cpu") if self.device.type == "sim" else values()


def token_batches(feed: Feed, *, vocab: int, seq: int) -> Iterator[Batch]:
    """Yield (inputs, targets) without end, int64 of [batch, seq]; targets are the inputs one token later.

    Checks its arguments at the call, not at the first batch.

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ByteWindows`.
    """
    # Neighbouring windows share one byte: the target of the last input.
    rows = token_rows(feed, vocab=vocab, length=seq + 1, overlap=1)
    return ((row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows)


def token_rows(feed: Feed, *, vocab: int, length: int, overlap: int) -> Iterator[Tensor]:
    """Yield int64 tensors of [batch, length] on the device without end: consecutive tokens.

    `overlap`: number of bytes that neighbouring windows of a file share.

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ByteWindows`.
    """
    if feed.data is None:
        # Drawn uniformly, so there is nothing to learn and nothing that a kernel could exploit.
        shape, options = (feed.batch, length), feed.host_options()
        rows = (
            feed.draw(lambda: torch.randint(vocab, shape, **options), shape, torch.int64)
            for _ in itertools.count()
        )
    else:
        windows = ByteWindows(feed.data, vocab, length, overlap, feed.shares)
        rows = (row.long() for (row,) in stream(windows, feed))
    return (row.to(feed.device) for row in rows)


def pair_batches(feed: Feed, *, vocab: int, seq: int) -> Iterator[Batch]:
    """Yield (source, target inputs, targets) without end, int64 of [batch, seq]: halves of token sequences.

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ByteWindows`.
    """
    rows = token_rows(feed, vocab=vocab, length=2 * seq, overlap=0)
    return (_source_and_target(row, seq) for row in rows)


def _source_and_target(row: Tensor, seq: int) -> Batch:
    targets = row[:, seq:].contiguous()
    start = torch.full_like(targets[:, :1], _START_TOKEN)
    return row[:, :seq].contiguous(), torch.cat((start, targets[:, :-1]), dim=1), targets


class ByteWindows(Dataset[tuple[Tensor]]):
    """A file cut into windows of `length` bytes; each window is a sample, a uint8 tensor.

    Raises:
        DataError: the file cannot be read, has fewer windows than there are ranks, or the vocabulary is too
            small for bytes.
    """

    def __init__(self, path: Path, vocab: int, length: int, overlap: int, world_size: int) -> None:
        if vocab < BYTE_VALUES:
            raise DataError(error_text("inputs.small_vocab", path, vocab, BYTE_VALUES))
        try:
            size = path.stat().st_size
            # A private mapping reads nothing before it is used, and ranks share the page cache.
            self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise DataError(f"cannot read the data file {path}: {_reason_of(error)}") from error
        self._length = length
        self._stride = length - overlap
        self._count = max(0, size - overlap) // self._stride
        if self._count < world_size:
            raise DataError(error_text("inputs.short_file", path, size, self._stride, world_size))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor]:
        start = index * self._stride
        return (self._bytes[start : start + self._length],)


def image_batches(feed: Feed, *, image: int, classes: int) -> Iterator[Batch]:
    """Yield (images, labels) without end: float32 of [batch, 3, image, image] from -1 to 1, int64 of [batch].

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ImageFolder`.
    """
    if feed.data is None:
        batches = _synthetic_images(feed, image, classes)
    else:
        workers = _CUDA_READERS if feed.device.type == "cuda" else 0
        batches = stream(ImageFolder(feed.data, image, classes), feed, workers)
    return ((images.to(feed.device), labels.to(feed.device)) for images, labels in batches)


def _synthetic_images(feed: Feed, image: int, classes: int) -> Iterator[Batch]:
    shape, options = (feed.batch, CHANNELS, image, image), feed.host_options()
    images = _drawn(feed, lambda size: torch.rand(size, **options).mul_(2).sub_(1), shape, torch.float32)
    while True:
        yield next(images), torch.randint(classes, (feed.batch,), **options)


def _drawn(
    feed: Feed, values: Callable[[int], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield tensors of `shape` without end, each from another offset into `values(size)`, drawn once.

    Drawing a batch can take as long as training on it, and readers of real data draw nothing.
    """
    size, places = math.prod(shape), math.prod(shape[1:])
    stream = torch.Generator().manual_seed(feed.seed * _SEED_STRIDE + feed.rank)
    drawn = feed.draw(lambda: values(size + places), (size + places,), dtype)
    while True:
        first = int(torch.randint(places, (), generator=stream, device="cpu"))
        yield drawn[first : first + size].view(shape)


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images in one subfolder per class, each scaled to fit its shorter side and cropped to the centre.

    Raises:
        DataError: pillow is missing, the folder is missing or has no images, or it has more classes than the
            model; for a single item, also if its file is not an image.
    """

    def __init__(self, folder: Path, image: int, classes: int) -> None:
        _pillow()
        if not folder.is_dir():
            raise DataError(error_text("inputs.no_folder", folder))
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if len(names) > classes:
            raise DataError(error_text("inputs.classes", folder, len(names), classes, len(names)))
        self._files = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not self._files:
            raise DataError(error_text("inputs.no_images", folder, ", ".join(sorted(IMAGE_SUFFIXES))))
        self._image = image

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, label = self._files[index]
        return read_image(path, self._image), torch.tensor(label, device="cpu")


def read_image(path: Path, side: int) -> Tensor:
    """Return the centre square of an image, float32 of [3, side, side] from -1 to 1.

    Raises:
        DataError: the file is not an image that pillow can read.
    """
    pillow = _pillow()
    try:
        with pillow.open(path) as picture:
            whole = picture.convert("RGB")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the image {path}: {_reason_of(error)}") from error
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
        raise DataError(error_text("inputs.pillow")) from error
    return Image


def click_batches(feed: Feed, *, numbers: int, features: int, rows: int) -> Iterator[Batch]:
    """Yield (numbers, ids, labels) without end: float32 of [batch, numbers], int64 of [batch, features] below
    `rows`, and float32 of [batch], each 0 or 1.

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ClickLog`.
    """
    if feed.data is None:
        batches = _synthetic_clicks(feed, numbers, features, rows)
    else:
        batches = stream(ClickLog(feed.data, numbers, features, rows), feed)
    return (tuple(tensor.to(feed.device) for tensor in items) for items in batches)


def _synthetic_clicks(feed: Feed, numbers: int, features: int, rows: int) -> Iterator[Batch]:
    batch, options = feed.batch, feed.host_options()
    # Drawn once, like images.
    of_numbers = _drawn(feed, lambda size: torch.rand(size, **options), (batch, numbers), torch.float32)
    of_ids = _drawn(
        feed, lambda size: torch.randint(rows, (size,), **options), (batch, features), torch.int64
    )
    while True:
        labels = feed.draw(lambda: torch.randint(2, (batch,), **options).float(), (batch,), torch.float32)
        yield next(of_numbers), next(of_ids), labels


class ClickLog(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The lines of a click log, of which only the file offsets are kept in memory.

    Empty fields are 0. A number x becomes sign(x) x log(1 + |x|); a hash maps a category's text to a row.

    Raises:
        DataError: the file cannot be read or has no lines; for a single line, also if its form is wrong.
    """

    def __init__(self, path: Path, numbers: int, features: int, rows: int) -> None:
        self._path, self._numbers, self._features, self._rows = path, numbers, features, rows
        self._starts: list[int] = []
        try:
            with path.open("rb") as log:
                position = 0
                for line in log:
                    if line.strip():
                        self._starts.append(position)
                    position += len(line)
        except OSError as error:
            raise DataError(f"cannot read the data file {path}: {_reason_of(error)}") from error
        if not self._starts:
            raise DataError(f"the data file {path} has no lines")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        with self._path.open("rb") as log:
            log.seek(self._starts[index])
            fields = log.readline().rstrip(b"\r\n").split(b"\t")
        expected = 1 + self._numbers + self._features
        if len(fields) != expected:
            wanted = expected, self._numbers, self._features
            raise DataError(error_text("inputs.fields", index, self._path, len(fields), *wanted))
        try:
            label, *values = (float(field or 0) for field in fields[: 1 + self._numbers])
        except ValueError as error:
            raise DataError(f"sample {index} of {self._path}: {error}") from None
        ids = [zlib.crc32(field) % self._rows for field in fields[1 + self._numbers :]]
        squeezed = [math.copysign(math.log1p(abs(value)), value) for value in values]
        return (
            torch.tensor(squeezed, dtype=torch.float32, device="cpu"),
            torch.tensor(ids, dtype=torch.int64, device="cpu"),
            torch.tensor(label, dtype=torch.float32, device="cpu"),
        )


class RankShare(Sampler[int]):
    """Endless sample indices of one rank.

    In each epoch, all ranks shuffle all indices equally and take disjoint shares; the remainder is left out.
    """

    def __init__(self, count: int, seed: int, rank: int, world_size: int) -> None:
        self._count, self._seed, self._rank, self._world_size = count, seed, rank, world_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        dealt = self._count - self._count % self._world_size
        while True:
            order = torch.randperm(self._count, generator=generator, device="cpu")[:dealt]
            yield from order[self._rank :: self._world_size].tolist()


def stream(dataset: ByteWindows | ImageFolder | ClickLog, feed: Feed, workers: int = 0) -> Iterator[Batch]:
    """Yield collated microbatches of one rank without end, in host memory (pinned for a CUDA device).

    `workers`: processes that read ahead; 0 reads in this process.

    Raises:
        DataError: there are fewer items than ranks.
        WorkloadError: see `Feed.shares`.
    """
    shares, count = feed.shares, len(dataset)
    if count < shares:
        raise DataError(f"{feed.data} has {count} samples: too few for {shares} ranks")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=feed.batch,
        sampler=RankShare(count, feed.seed, feed.rank, shares),
        num_workers=workers,
        pin_memory=feed.device.type == "cuda",
        # A separate one: a loader draws a seed for its workers, which must not shift the model's stream.
        generator=torch.Generator(),
    )
    return (tuple(items) for items in loader)


def _reason_of(error: Exception) -> str:
    """Return the reason of an error in one line, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).split("\n")[0]
