"""Random programs of allocations and frees on a GPU and on the simulated one: do all counters agree?

    python ci/allocator_on_gpu.py [--device cuda] [--programs 20] [--steps 300]

Memory is limited to a few GiB on both, so that programs run into retries and out of memory. Counters are
compared after every step, when the device is idle, so that no answer depends on time. Exits with 1 at the
first difference, after printing it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdpbench.engine.devices.base import Placement
from fsdpbench.script.rehearsal import rehearse_where_asked
from fsdpbench.sim.model.allocator import AllocatorConf

LIMIT_GIB = 2.0 + 2.0**-10  # no program ends on it: there the last bit of a share of the memory decides
COUNTERS = (
    "allocated_bytes.all.current",
    "active_bytes.all.current",
    "reserved_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "segment.all.current",
    "num_alloc_retries",
    "num_ooms",
)
SIZES = (300, 5_000, 700_000, 1_500_000, 9_000_000, 30_000_000, 250_000_000, 700_000_000)


@dataclass(frozen=True)
class Step:
    """`kind`: allocate (`size` bytes), free or record (the `index`-th live tensor), or empty the cache."""

    kind: str
    size: int = 0
    index: int = 0


def program(seed: int, steps: int) -> list[Step]:
    """A random program; what it refers to is taken modulo what lives."""
    dice = random.Random(seed)
    kinds = dice.choices(("allocate", "free", "record", "empty"), weights=(50, 42, 6, 2), k=steps)
    return [
        Step(kind, int(dice.choice(SIZES) * dice.uniform(0.5, 1.5)), dice.randrange(1 << 16))
        for kind in kinds
    ]


def run(steps: list[Step], device: torch.device) -> Iterator[dict[str, Any]]:
    """Carry a program out; after each step the counters, relative to the beginning where they are totals."""
    module = torch.get_device_module(device)
    side, live = module.Stream(), []
    module.synchronize()
    module.empty_cache()
    module.reset_peak_memory_stats()
    before = module.memory_stats()
    for step in steps:
        if step.kind == "allocate":
            with contextlib.suppress(torch.OutOfMemoryError):
                live.append(torch.empty(step.size, dtype=torch.uint8, device=device))
        elif step.kind == "empty":
            module.empty_cache()
        elif live and step.kind == "record":
            live[step.index % len(live)].record_stream(side)
        elif live:
            del live[step.index % len(live)]
        module.synchronize()
        after = module.memory_stats()
        yield {
            name: after.get(name, 0) - (before.get(name, 0) if name.startswith("num_") else 0)
            for name in COUNTERS
        }


def start_device(name: str) -> torch.device:
    """The device, fresh, with `LIMIT_GIB` of memory and the allocator's settings of the environment."""
    limit = LIMIT_GIB * 2**30
    if name == "sim":
        from fsdpbench.sim import Simulation, load_profile

        profile = load_profile("h100-80gb")
        conf = AllocatorConf.parse(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        conf = dataclasses.replace(conf, per_process_memory_fraction=limit / profile.memory_bytes)
        Simulation.start(profile, 1, 1, allocator_conf=conf)
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
    return torch.device(name, 0)


def compare(seed: int, steps: int, real: str) -> str | None:
    """The first difference between the two devices, None if there is none."""
    plan = program(seed, steps)
    ours, theirs = (list(run(plan, start_device(name))) for name in ("sim", real))
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        wrong = [name for name in COUNTERS if a[name] != b[name]]
        if wrong:
            counts = ", ".join(f"{name}: {real} {a[name]:,} sim {b[name]:,}" for name in wrong)
            return f"program {seed}, step {number} ({plan[number]}): {counts}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or sim to try the script out")
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if options.device == "cuda":  # in a rehearsal "cuda" is the simulated device too
        rehearse_where_asked(Placement(0, 1, 0), 1)
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "defaults")
    print(f"{options.programs} programs of {options.steps} steps, {LIMIT_GIB:g} GiB, allocator: {conf}")
    for seed in range(options.programs):
        difference = compare(seed, options.steps, options.device)
        if difference:
            print(difference)
            return 1
    print(f"equal after every step: {', '.join(COUNTERS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
