"""The example's script trains on two CPU ranks, with this project's FSDP and with PyTorch's, alike."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train_t5.py"
LINE = re.compile(r"epoch (\d+): loss ([\d.]+), validation ([\d.]+)")


WORDS = "shard the parameters, gather them for each unit, reduce the gradients and free what is done. "
# Each FSDP has its own layout of parameters; where kernels go by addresses, Adam makes the last bits large.
EXACT_PRODUCTS = {"FSDPBENCH_PRODUCTS": "exact"}
PRODUCTS = Path(__file__).parents[1] / "products"


def train(package: str, folder: Path) -> list[tuple[float, float]]:
    """(training loss, validation loss) of each epoch."""
    text, unseen = folder / "text.txt", folder / "unseen.txt"
    text.write_text(WORDS * 30)
    unseen.write_text(" ".join(sorted(WORDS.split())) * 30)
    texts = ["--text", str(text), "--validation-text", str(unseen)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    path = os.pathsep.join(filter(None, [str(PRODUCTS), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [*command, str(SCRIPT), "--fsdp", package, *texts],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **EXACT_PRODUCTS},
    )
    try:
        out, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
        raise
    assert process.returncode == 0, err[-3000:]
    found = LINE.findall(out)
    assert [int(epoch) for epoch, _, _ in found] == [1, 2], out
    return [(float(loss), float(validation)) for _, loss, validation in found]


@pytest.mark.campaign
def test_the_script_learns(tmp_path: Path) -> None:
    (first, first_validation), (last, last_validation) = train("fsdpbench.impl", tmp_path)
    assert last < first - 0.3
    assert last_validation < first_validation


@pytest.mark.campaign
def test_one_import_decides_and_nothing_else_changes(tmp_path: Path) -> None:
    ours, torchs = train("fsdpbench.impl", tmp_path), train("torch.distributed.fsdp", tmp_path)
    for own, reference in zip(ours, torchs, strict=True):
        assert own == pytest.approx(reference, abs=2e-4)  # the last of the four digits that the script prints
