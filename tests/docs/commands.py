"""The commands that the pages show, and the files that they name, made so that each can run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^( *)```[a-z]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(fsdpbench [^`]+)`")
_TEMPLATE = re.compile(
    r"\.\.\.|…|\||\[|(?<!/)\b(?:COMMAND|FILE|FOLDER|PATH|NAME|MINUTES|SEED|SPACE|RESULTS|ARGUMENTS|N)\b"
)
_INSTALLED = re.compile(r"^python3 -m venv .*&& \.venv/bin/(?=fsdpbench )")
_TO_TYPE = "docs/how-to/index.md"
"""The page whose tables hold commands to type."""
_COMPLETE = re.compile(r" (?:--model|--hf-config|--script) |^fsdpbench (?:explain (?!-)|completion |doctor )")
"""Elsewhere, commands between words are to be typed if they say what to run; others only name a command."""


@dataclass(frozen=True)
class Command:
    """A command of a page: its words, `fsdpbench` first. `shown`: to be typed as it is."""

    page: str
    words: tuple[str, ...]
    shown: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """README and all pages of `docs`."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> Iterator[Command]:
    """What a page shows or names as a command; forms with placeholders (FILE, [..], a|b) are left out."""
    source, name = page.read_text(), page.relative_to(ROOT).as_posix()
    blocks = [re.sub(r"\\\n\s*", "", block[2]) for block in _BLOCK.finditer(source)]
    texts = [(line, True) for block in blocks for line in block.splitlines()]
    inline = _INLINE.findall(_BLOCK.sub("", source))
    texts += [(text, name == _TO_TYPE or bool(_COMPLETE.search(text))) for text in inline]
    for text, shown in texts:
        line = re.sub(r"\s+(?:#|> ).*$", "", text.strip().removeprefix("$ "))
        line = _INSTALLED.sub("", line)
        if line.startswith("fsdpbench ") and not _TEMPLATE.search(line):
            yield Command(name, tuple(shlex.split(line)), shown)


def make_files(folder: Path, traced: Path, made_by_the_page: set[str]) -> None:
    """In `folder`, what commands name: scripts, spaces, traces, runs. `traced`: a small sweep's folder."""
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    shutil.copytree(ROOT / "ci", folder / "ci", ignore=shutil.ignore_patterns("measured"))
    shutil.copy(ROOT / "docs" / "examples" / "oom.txt", folder / "oom.txt")
    (folder / "train.py").write_text(TRAINING)
    (folder / "space.toml").write_text('model = "gpt-tiny"\n[settings]\nbatch = [2, 4]\n')
    (folder / "mine.toml").write_text('name = "mine"\nbase = "h100-80gb"\n')
    published = json.loads((ROOT / "tests" / "data" / "hf_configs.json").read_text())["qwen3-8b"]["config"]
    for name in ("config.json", "path/to/config.json", "path/to/model-folder/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(published))
    trace = next(traced.glob("*/trace/*_trace.json.gz"))
    for name in ("trace.json.gz", "old.json.gz", "new.json.gz", "traces/rank0_trace.json.gz"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(trace, folder / name)
    for name in {
        "runs/NAME",
        "runs/A",
        "runs/B",
        "runs/before",
        "runs/after",
        "runs/single",
    } - made_by_the_page:
        shutil.copytree(traced, folder / name)
    _write_dumps(folder / "dumps")
    for kind in ("gather", "reduce"):
        (folder / f"{kind}-2.txt").write_text(_nccl_tests(kind))
    (folder / "runs" / "atlas").mkdir(parents=True)
    (folder / "runs" / "atlas" / "atlas.json").write_text(json.dumps(_ATLAS))
    _commit_baseline(folder)


def _nccl_tests(kind: str) -> str:
    """Return what nccl-tests prints on two nodes of eight GPUs with a slow network."""
    program, factor, redop = {
        "gather": ("all_gather_perf", 1, "none"), "reduce": ("all_reduce_perf", 2, "sum"),
    }[kind]  # fmt: skip
    lines = [f"# Collective test starting: {program}"]
    lines += [f"#  Rank {rank:2d} Group  0 Pid 1 on n-{rank // 8} device {rank % 8}" for rank in range(16)]
    lines += ["#   size count type redop root time algbw busbw #wrong time algbw busbw #wrong"]
    for size in (1 << power for power in range(16, 33)):
        us = 120 + factor * size / 2e5
        rates = f"{us:.2f} {size / us / 1e3:.4f} {factor * size / us / 1e3 * 15 / 16:.4f} 0"
        lines.append(f"{size:12d} {size // 4:12d} float {redop} -1 {rates} {rates}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", ""])


def _commit_baseline(folder: Path) -> None:
    """Makes `folder` a git repository of one commit: the committed baseline, whose history a page reads."""
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for words in (("init", "-q"), ("add", "ci/baseline.json"), (*author, "commit", "-q", "-m", "Baseline")):
        subprocess.run(["git", *words], cwd=folder, check=True)


def _write_dumps(folder: Path) -> None:
    """Flight Recorder dumps of two ranks, one of which stops a call earlier."""
    folder.mkdir()
    for rank, calls in ((0, 2), (1, 1)):
        call = {
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "state": "scheduled",
        }
        sizes = {"input_sizes": [[4]], "input_dtypes": ["Float"]}
        entries = [
            {**call, **sizes, "state": "scheduled", "collective_seq_id": number + 1}
            for number in range(calls)
        ]
        content = {"pg_config": {}, "version": "2.10", "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_text(json.dumps(content))


_CELL = {"model": "llama3-70b", "hardware": "h100-80gb", "gpus": 64, "status": "does_not_fit"}
_ATLAS = {
    "schema": 1,
    "system": "torch-fsdp2",
    "versions": {},
    "models": {"llama3-70b": {"parameters": 1}},
    "hardware": ["h100-80gb"],
    "gpus": [64],
    "cells": [_CELL],
}
TRAINING = """
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
batch = int(sys.argv[sys.argv.index("--batch") + 1]) if "--batch" in sys.argv else 8
for _ in range(20):
    model(torch.randn(batch, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
