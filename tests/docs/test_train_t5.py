"""The example's script trains on two CPU ranks, with this project's FSDP and with PyTorch's, alike."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train_t5.py"
LINE = re.compile(r"epoch (\d+): loss ([\d.]+), validation ([\d.]+)")

PACKAGES = ("impl", "torch.distributed.fsdp")
WORDS = "shard the parameters, gather them for each unit, reduce the gradients and free what is done. "
# MKL chooses kernels by the addresses of its operands, and each FSDP lays parameters out in its own way: what
# differs in the last bit, Adam's first steps make large.
SAME_KERNELS = {"MKL_CBWR": "COMPATIBLE"}


# What torchrun does for a script, for two ranks of each package, forked after one import of torch.
LAUNCH = """
import os, runpy, sys
import torch._dynamo, torch.distributed.fsdp, impl, workloads  # each rank would, one by one
script, packages, port, folder, *texts = sys.argv[1:]
for package in packages.split():
    ranks = []
    for rank in range(2):
        child = os.fork()
        if child:
            ranks.append(child)
            continue
        os.dup2(os.open(f"{folder}/{package}.rank{rank}", os.O_WRONLY | os.O_CREAT), 1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
        sys.argv = [script, "--fsdp", package, *texts]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    if any([os.waitpid(child, 0)[1] for child in ranks]):
        sys.exit(f"{package} failed")
"""


def train(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """By package: (training loss, validation loss) of each epoch."""
    text, unseen = folder / "text.txt", folder / "unseen.txt"
    text.write_text(WORDS * 30)
    unseen.write_text(" ".join(sorted(WORDS.split())) * 30)
    texts = ["--text", str(text), "--validation-text", str(unseen)]
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(SCRIPT), " ".join(PACKAGES), port, str(folder), *texts],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **SAME_KERNELS},
    )
    try:
        _, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
        raise
    assert process.returncode == 0, err[-3000:]
    losses = {}
    for package in PACKAGES:
        out = "".join((folder / f"{package}.rank{rank}").read_text() for rank in range(2))
        found = LINE.findall(out)
        assert [int(epoch) for epoch, _, _ in found] == [1, 2], out
        losses[package] = [(float(loss), float(validation)) for _, loss, validation in found]
    return losses


def test_one_import_decides_and_nothing_else_changes(tmp_path: Path) -> None:
    ours, torchs = train(tmp_path).values()
    assert ours == torchs  # to the four digits that the script prints
    (first, first_validation), (last, last_validation) = ours
    assert last < first - 0.3
    assert last_validation < first_validation
