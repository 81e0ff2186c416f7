"""Tiny packages that a script imports, as wheels, and environments that hold them."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

NOTHING = "def after_backward(tensor):\n    pass\n"
SLOWER = """
import torch
import torch.distributed as dist

def after_backward(tensor):
    held = torch.empty(1 << 22, device="cuda")
    gathered = torch.empty(dist.get_world_size() * 1024, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.ones(1024, device="cuda"))
    copied = tensor.detach().clone()
    return float(copied.sum()), held
"""
COPIES = "def after_backward(tensor):\n    return tensor.detach().clone()\n"
FAILS = "def after_backward(tensor):\n    raise RuntimeError('no such feature any more')\n"
SCRIPT = """
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import {imports}

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2))).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    loss = model(torch.ones(64, 256, device="cuda")).sum()
    loss.backward()
    {calls}
    optimizer.step()
    optimizer.zero_grad()
"""


def script(folder: Path, *names: str) -> Path:
    """A training script that calls `after_backward` of these packages."""
    path = folder / "train.py"
    calls = "; ".join(f"{name}.after_backward(loss)" for name in names)
    path.write_text(SCRIPT.format(imports=", ".join(names), calls=calls))
    return path


def wheel(folder: Path, name: str, version: str, body: str, needs: tuple[str, ...] = ()) -> None:
    """A wheel of one module, for pip's --find-links."""
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", body)
        file.writestr(f"{about}/METADATA", metadata)
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def environment(folder: Path, *packages: tuple[str, str, str], shares: bool = True) -> Path:
    """An interpreter with modules of these names, versions and bodies; `shares`: all packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    if shares:
        (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    for name, version, body in packages:
        (site / f"{name}.py").write_text(body)
        about = site / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"
