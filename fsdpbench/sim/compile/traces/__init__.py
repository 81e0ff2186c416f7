"""What Dynamo made of a frame, kept on disk for later processes: its tracing is most of a warm compilation.

    a frame ─> key ─> entry on disk ─> its guards, built of the present values ─┬─ the same words: taken
                                                                                └─ else: traced, and kept

- `kept.py`: takes the place of Dynamo's tracing. `frame.py`: a frame, and where its trace is kept.
- `guards.py`: the guards of a trace, and what they say. `meaning.py`: what an object's number in them means.
- `entry.py`: what is kept of a trace. `sizes_seen.py`: of which sizes Dynamo makes symbols later.
- `restored.py`: a kept trace as the rest of Dynamo takes it.

Nothing doubtful is kept: a guard of an unknown kind, a value that only its number tells apart, a break.
"""

from __future__ import annotations

import os

import torch

_TRIED = ("2.13.",)
"""Versions of torch that this was tried with: it takes a part of Dynamo's inner life for granted."""
_TOLD = ("TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG")
"""Whoever sets these wants to see Dynamo trace."""


def can_be_kept() -> bool:
    """Whether traces are kept in this process; else each process traces, as torch has it."""
    return torch.__version__.startswith(_TRIED) and not any(name in os.environ for name in _TOLD)
