"""Which torch the tests run with: where an older one differs from the newest, `impl` follows the newest."""

from __future__ import annotations

import torch

TORCH: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
BEFORE_2_13 = TORCH < (2, 13)
BEFORE_2_12 = TORCH < (2, 12)
