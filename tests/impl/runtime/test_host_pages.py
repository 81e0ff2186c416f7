"""Memory that a CPU rank frees stays with its process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
import torch
from fsdpbench.impl.runtime.buffer import keep_freed_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(12 << 20, dtype=torch.uint8) for _ in range(3)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
keep_freed_pages(100 << 20)
print(*[faults() for _ in range(5)])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what another malloc keeps is its own choice")
def test_what_is_freed_is_not_cleared_again() -> None:
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))
    }
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=own, capture_output=True, text=True, check=True
    )
    first, *_, last = map(int, told.stdout.split())  # some steps until each block has its place
    assert last < first / 2
