"""Ranks compute exactly, also where the rest of the suite rounds as another CPU would (ci/other_cpus.sh)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PRODUCTS = HERE.parent / "products"
PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
exact = (a.double().numpy() @ b.double().numpy())
def is_exact(product): return bool((product.numpy() == exact.astype("float32")).all())
before = is_exact(a @ b)
import rank_pool
rank_pool._exact_products()
print(before, is_exact(a @ b), is_exact(torch.addmm(torch.zeros(64), a, b)))
"""


@pytest.mark.parametrize("noise", ["noise-1", pytest.param("noise-2", marks=pytest.mark.campaign)])
def test_the_ranks_products_are_exact_beside_noise(noise: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PRODUCTS), "FSDPBENCH_PRODUCTS": noise}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(HERE)],
        env=environment, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True", "True"]
