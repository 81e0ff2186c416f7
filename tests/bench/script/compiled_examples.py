"""Examples one after another, each as `__main__`, with compiled blocks.

python compiled_examples.py MODULE:CLASS SCRIPT [ARGUMENT ...] [-- SCRIPT [ARGUMENT ...]]
"""

from __future__ import annotations

import importlib
import runpy
import sys
from itertools import groupby
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"

sys.path.insert(0, str(EXAMPLES))
for named in sys.argv[1].split(","):
    module, _, name = named.partition(":")
    block = getattr(importlib.import_module(module), name)
    block.forward = torch.compile(block.forward)
for is_end, words in groupby(sys.argv[2:], lambda word: word == "--"):
    if not is_end:
        sys.argv = [str(EXAMPLES / word) if word.startswith("train_") else word for word in words]
        runpy.run_path(sys.argv[0], run_name="__main__")
        print("ran", Path(sys.argv[0]).name, flush=True)
