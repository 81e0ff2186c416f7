"""The tiny model of every family, a batch for it, and real data that each can read."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from fsdpbench.workloads import Workload, get_workload

FAMILIES = (
    "gpt-tiny",
    "t5-tiny",
    "llama-tiny",
    "decoder-tiny",
    "moe-tiny",
    "regnet-tiny",
    "deepvit-tiny",
    "dhen-tiny",
)
SHORT = 16


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> Workload:
    """Each family in turn."""
    return get_workload(request.param)


@pytest.fixture
def short() -> Callable[[Workload], int | None]:
    """A sequence length for quick tests, None for models without sequences."""
    return lambda workload: None if workload.default_seq is None else SHORT


@pytest.fixture
def one_batch(short: Callable[[Workload], int | None]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A batch of a workload."""

    def take(workload: Workload, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
        return next(workload.batches(batch, short(workload), seed, 0, "cpu"))

    return take


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three classes of 12 noisy pictures, each with a colour of its own."""
    from PIL import Image

    folder = tmp_path / "images"
    colours = {"blue": (40, 40, 220), "green": (40, 220, 40), "red": (220, 40, 40)}
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for index in range(12):
            noise = Image.effect_noise((40 + index, 48), 60).convert("RGB")
            plain = Image.new("RGB", noise.size, colour)
            Image.blend(noise, plain, 0.5).save(folder / name / f"{index:02}.png")
    return folder


@pytest.fixture
def click_log(tmp_path: Path) -> Path:
    """240 lines in the form of the Criteo logs; the first category decides the label."""
    draw = random.Random(0)
    lines = []
    for _ in range(240):
        categories = [f"{draw.choice('abcdefgh')}{column}" for column in range(26)]
        numbers = [str(draw.randint(0, 99)) if draw.random() < 0.8 else "" for _ in range(13)]
        lines.append("\t".join([str(int(categories[0][0] in "abcd")), *numbers, *categories]))
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def real_data(image_folder: Path, click_log: Path) -> Callable[[Workload], Path]:
    """Data that a workload can read: the licence is a text that every checkout has."""
    licence = Path(__file__).parents[2] / "LICENSE"
    kinds = {"regnet": image_folder, "deepvit": image_folder, "dhen": click_log}
    return lambda workload: kinds.get(workload.family, licence)


@pytest.fixture
def train() -> Callable[..., list[float]]:
    """Losses of so many steps with AdamW."""

    def run(workload: Workload, steps: int, *, batch: int, seq: int | None, data: Path) -> list[float]:
        torch.manual_seed(0)
        model = workload.build(seq=seq)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for tensors in islice(workload.batches(batch, seq, 0, 0, "cpu", data), steps):
            loss = model(*tensors)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return run
