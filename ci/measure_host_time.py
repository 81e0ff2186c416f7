"""Host time of an FSDP unit, this project's as a share of torch's, in one process and by turns.

    python ci/measure_host_time.py [--rounds 30]

24 units of 12 or 36 small parameters and a root under a fake group of eight on the CPU
(tests/impl/host_cases.py): next to no computation. A unit's time is a step's, less the plain model's, divided
by 24. Systems take turns step by step, and the medians of all rounds are compared, in processor time, so that
other work on the machine changes both sides. "inference": forward alone, frozen and without gradients.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "impl"))

from host_cases import UNITS, build, fake_group, forget_gradients, step

FRONTS = {"fsdp2": 0.25, "original": 0.25, "flat": 0.32}
"""What a unit may take at most, as a share of torch's."""


def forward(model: Any, batch: torch.Tensor) -> None:
    """Run a frozen model."""
    with torch.no_grad():
        model(batch)


def times(systems: list[str], parameters: int, low: bool, frozen: bool, rounds: int) -> dict[str, float]:
    """Median processor seconds of a step by system; `plain` is the model alone."""
    batch = torch.ones(4, 16)
    models = {name: build(name, parameters, low) for name in ("plain", *systems)}
    for model in models.values():
        model.requires_grad_(not frozen)
        for _ in range(3):
            (forward if frozen else step)(model, batch)
            forget_gradients(model)
    taken: dict[str, list[float]] = {name: [] for name in models}
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(rounds):
        for name, model in models.items():
            began = time.thread_time()
            (forward if frozen else step)(model, batch)
            taken[name].append(time.thread_time() - began)
            forget_gradients(model)
    gc.enable()
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(f"torch {torch.__version__}; us a unit: impl, torch, and the share (at most)")
    with fake_group():
        for frozen in (False, True):
            for parameters in (12, 36):
                for low in (False, True):
                    for front, most in FRONTS.items():
                        names = [f"impl-{front}", f"torch-{front}"]
                        found = times(names, parameters, low, frozen, options.rounds)
                        impl, torchs = ((found[name] - found["plain"]) / UNITS * 1e6 for name in names)
                        kind = ("inference" if frozen else "training") + (" bf16" if low else " fp32")
                        print(
                            f"{kind:15} {parameters:3} parameters {front:9} {impl:8.1f} {torchs:8.1f} "
                            f"{impl / torchs:6.2f} ({most}){'' if impl <= most * torchs else '  missed'}",
                            flush=True,
                        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
