"""What a script does that costs time for nothing: backward inside of autocast, gradients filled with zeros,
norms taken one by one, autograd's search for NaN and CUDA's launches one by one left on."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdpbench.script.own_files import OwnFiles

_SEVERAL = 8
"""Norms of one line in a step, from which the line is named."""

_BLOCKING = "CUDA_LAUNCH_BLOCKING"

Place = dict[str, Any]


class Habits:
    """Notes them. `place` tells the script's line that runs."""

    def __init__(self, own_files: OwnFiles, place: Callable[[], Place]) -> None:
        self.backward_in_autocast: Place | None = None
        self.zeroed: Place | None = None
        self.anomaly: Place | None = None
        self._asked_for_anomaly: Place | None = None
        self._own_files = own_files
        self._place = place
        self._norms: Counter[tuple[str, int]] = Counter()
        self._norm_places: dict[tuple[str, int], Place] = {}
        self._around(torch.Tensor, "backward", self._backward)
        for kind in (torch.autograd.detect_anomaly, torch.autograd.set_detect_anomaly):
            self._around(kind, "__init__", self._asks_for_anomaly)
        self._around(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._around(nn.Module, "zero_grad", self._zero_grad)
        for owner, name in ((torch.Tensor, "norm"), (torch, "norm"), (torch.linalg, "vector_norm")):
            self._around(owner, name, self._norm)

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self.backward_in_autocast is None and torch.is_autocast_enabled("cuda"):
            self.backward_in_autocast = self._place()
        if self.anomaly is None and torch.is_anomaly_enabled():
            self.anomaly = self._asked_for_anomaly or self._place()

    def _asks_for_anomaly(self, *args: Any, **kwargs: Any) -> None:
        self._asked_for_anomaly = self._place()

    def _one_by_one(self) -> Place | None:
        """Where the script asks for it; without a line where its environment does."""
        if os.environ.get(_BLOCKING) != "1":
            return None
        for file in self._own_files.seen():
            for number, text in enumerate(linecache.getlines(file), 1):
                if _BLOCKING in text:
                    return {"file": file, "line": number, "text": text.strip()}
        return {"file": "", "line": 0, "text": f"{_BLOCKING}=1"}

    def _zero_grad(self, owner: Any, set_to_none: bool = True, **kwargs: Any) -> None:
        if not set_to_none and self.zeroed is None:
            self.zeroed = self._place()

    def _norm(self, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(2)  # who calls what is around the function
        if not self._own_files.has(frame.f_code.co_filename):
            return
        key = frame.f_code.co_filename, frame.f_lineno
        self._norms[key] += 1
        if key not in self._norm_places:
            self._norm_places[key] = self._place()

    def _around(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                note(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, noted)

    def to_dict(self, steps: int) -> dict[str, Any]:
        """`norms`: the line that takes most of them, and how many a step."""
        norms = None
        if self._norms and steps:
            key, count = self._norms.most_common(1)[0]
            if count >= _SEVERAL * steps:
                norms = {**self._norm_places[key], "per_step": count / steps}
        return {
            "backward_in_autocast": self.backward_in_autocast,
            "zeroed": self.zeroed,
            "anomaly": self.anomaly,
            "launch_blocking": self._one_by_one(),
            "norms": norms,
        }
