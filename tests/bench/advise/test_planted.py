"""Scripts with one mistake: the first line of advice names it. Good ones get no advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .trained import GOOD, MISTAKES, script

EXPECTED = {
    "item": ("no-waits", "loss.item()"),
    "synchronize": ("no-waits", "torch.cuda.synchronize()"),
    "empty_cache": ("no-waits", "torch.cuda.empty_cache()"),
    "barrier": ("no-waits", "dist.barrier()"),
    "pageable": ("no-waits", "batch = next(loader)"),
    "one_unit": ("wrap-blocks", "fully_shard(model"),
    "one_unit_fsdp1": ("wrap-blocks", "FullyShardedDataParallel("),
    "root": ("wrap-root", "fully_shard(block"),
    "loader": ("loader-time", "DataLoader("),
    "sleeping_loader": ("loader-time", "DataLoader("),
    "starving_workers": ("loader-time", "DataLoader("),
    "checkpoint": ("no-checkpoint", "checkpoint_wrapper(block)"),
    "fp32": ("bf16", "fully_shard(block"),
    "foreach": ("fused", "AdamW("),
    "offload": ("no-offload", "fully_shard(block"),
    "no_prefetch_fsdp1": ("backward-prefetch", "FullyShardedDataParallel("),
    "tiny_batch": ("double-batch", "DataLoader("),
    "early_optimizer": ("", "optimizer = torch.optim.AdamW("),
    "gathers_fp32": ("bf16", "fully_shard(block"),
    "backward_in_autocast": ("", "loss.backward()"),
    "zeros": ("none-grads", "set_to_none=False"),
    "norms_item": ("no-waits", "p.grad.norm()"),
    "norms": ("", "p.grad.norm()"),
    "no_limit_fsdp1": ("limit", "FullyShardedDataParallel("),
    "halves": ("wrap-blocks", "fully_shard("),
    "needless_reshard": ("keep", "fully_shard(block"),
    "anomaly": ("", "set_detect_anomaly(True)"),
    "launch_blocking": ("", "CUDA_LAUNCH_BLOCKING"),
    "clip_item": ("no-waits", "clip_grad_norm_"),
    "nan_check": ("no-waits", "torch.isnan(loss)"),
}
"""The variation of the first line, and what stands at the line of the script that it names."""


def advised(fsdpbench: Callable[..., Any], folder: Path, name: str) -> tuple[dict[str, Any], list[str]]:
    """The advice on the script called `name`, and its lines."""
    path = folder / "train.py"
    path.write_text(script(name))
    words = ("run", "--script", str(path), "--gpus", "8", "--hardware", "h100-80gb", "--advise", "--json")
    return fsdpbench.json(*words, "-o", str(folder / "run"))["advice"], script(name).splitlines()


@pytest.mark.campaign
@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_line_names_the_mistake(name: str, fsdpbench: Callable[..., Any], tmp_path: Path) -> None:
    advice, lines = advised(fsdpbench, tmp_path, name)
    variation, text = EXPECTED[name]
    first = advice["advice"][0]
    assert first["variation"].partition("=")[0] == variation, advice
    file, _, number = first["place"].rpartition(":")
    assert file == "train.py"
    assert text in lines[int(number) - 1]


@pytest.mark.campaign
@pytest.mark.parametrize("name", GOOD)
def test_a_good_script_gets_no_advice(name: str, fsdpbench: Callable[..., Any], tmp_path: Path) -> None:
    advice, _ = advised(fsdpbench, tmp_path, name)
    assert advice["advice"] == []
    assert advice["no_effect"] == []
