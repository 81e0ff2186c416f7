"""Configurations drawn from all settings, run under the sanitizer: none may have a finding.

python tests/sim/sanitizer/clean_configurations.py [COUNT] [SEED]
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fsdpbench.base.configuration.config import Config, JitterSettings, Measurement
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.launch.pool import PointPool
from fsdpbench.sweep.planning import make_config, make_target, not_applicable, without_absent

SYSTEMS = ("impl-fsdp1", "impl-fsdp2", "torch-fsdp1", "torch-fsdp2", "torch-ddp")
MODELS = ("gpt-tiny", "t5-tiny", "llama-tiny", "regnet-tiny", "deepvit-tiny", "dhen-tiny")
VALUES = {
    "batch": ("1", "2", "3"),
    "grad_accum": ("1", "2", "3"),
    "grad_sync": ("every", "last"),
    "strategy": (
        "FULL_SHARD",
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    ),
    "shard_size": ("node", "2", "4"),
    "wrap": ("block", "block", "every-2", "size:20000", "root"),
    "reshard_after_forward": ("auto", "auto", "true", "false", "2"),
    "backward_prefetch": ("pre", "post", "none"),
    "backward_prefetch_depth": ("1", "2", "3"),
    "forward_prefetch": ("0", "1", "2"),
    "limit_all_gathers": ("off", "1", "2", "auto"),
    "memory_handover": ("auto", "record_stream", "events"),
    "layout": ("auto", "auto", "grouped", "packed"),
    "param_dtype": ("bf16", "fp16", "fp32"),
    "reduce_dtype": ("bf16", "fp32"),
    "buffer_dtype": ("auto", "bf16", "fp32"),
    "activation_checkpointing": ("none", "full", "every-2", "op", "op-every-2"),
    "cpu_offload": ("false", "false", "true"),
    "optimizer": ("adamw", "adamw-foreach", "adamw-loop", "sgd"),
    "zero_grad": ("release", "fill"),
}
_COULD_NOT_RUN = ("error", "crash")
"""Settings that the system itself refuses when it wraps the model, or fails with: no word on races."""


def drawn(count: int, seed: int) -> Iterator[Config]:
    """Configurations that their systems can run, no two alike, as many of each system."""
    chance, known = random.Random(seed), set()
    while len(known) < count:
        system = SYSTEMS[len(known) % len(SYSTEMS)]
        target = make_target(
            model=chance.choice(MODELS),
            shape={},
            device="sim",
            hardware=chance.choice(("a100-80gb", "h100-80gb")),
            gpus=chance.choice((2, 8, 16)),
            gpus_per_node=None,
            data=None,
            measurement=Measurement(1, 1, 1, timeout_s=120.0),
            sanitize=True,
        )
        texts = {name: chance.choice(values) for name, values in VALUES.items()}
        if target.model == "t5-tiny" and texts["wrap"].startswith("size"):
            continue  # its tied weights would lie in two units
        settings = Settings.of(**{name: SETTINGS[name].read(text) for name, text in texts.items()})
        try:
            config = without_absent(make_config(target, system, settings, target.workload()))
        except UsageError:
            continue  # a length or class that this model lacks
        if not_applicable(config) or _races_in_torch(config):
            continue
        if chance.random() < 0.2:
            config = dataclasses.replace(config, jitter=JitterSettings(seed=chance.randrange(100)))
        key = json.dumps(config.to_dict(), sort_keys=True, default=str)
        if key not in known:
            known.add(key)
            yield config


def _races_in_torch(config: Config) -> bool:
    """A true finding, in torch's FSDP1: `bugs/fsdp.py`, `offload_without_sharding_in_torch`."""
    settings = config.settings
    return config.system == "torch-fsdp1" and settings.strategy == "NO_SHARD" and bool(settings.cpu_offload)


def run(configs: Iterator[Config], folder: Path, jobs: int = 2) -> tuple[Counter[str], int, list[str]]:
    """How often each status came, uses of memory followed, and what had findings."""
    counts: Counter[str] = Counter()
    uses, wrong, running, index = 0, [], 0, 0
    with PointPool(jobs) as pool:
        waiting = list(configs)
        while waiting or running:
            while waiting and pool.has_room:
                place = folder / f"{index:03}"
                place.mkdir()
                pool.start(waiting.pop(0), place)
                running, index = running + 1, index + 1
            for config, place, ended in pool.finished(1.0):
                result = ended.to_dict()
                running -= 1
                counts[f"{config.system} {result['status']}"] += 1
                uses += (result.get("sanitizer") or {}).get("accesses", 0)
                if result["status"] != "ok":
                    print(_told(config, place, result), flush=True)
                if result["status"] not in ("ok", *_COULD_NOT_RUN):
                    wrong.append(config.name)
                if not sum(counts.values()) % 20:
                    print(f"{sum(counts.values())} done", file=sys.stderr, flush=True)
    return counts, uses, wrong


def _told(config: Config, place: Path, result: dict[str, object]) -> str:
    found = (result.get("sanitizer") or {}).get("findings", [])  # type: ignore[attr-defined]
    sides = [f"{f['kind']} {f['first']['line']} {f['second']['line']}" for f in found[:3]]
    what = f"{place.name} {config.model} {config.gpus}x {config.name}"
    return f"{what}: {result['status']} {result['cause']} {sides}"


def main(count: int, seed: int) -> int:
    """Draw and run; prints counts. Exit code."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts, uses, wrong = run(drawn(count, seed), Path(folder))
    for name, number in sorted(counts.items()):
        print(f"{number:5} {name}")
    seconds = time.monotonic() - began
    print(f"{sum(counts.values())} configurations drawn with seed {seed}, {seconds:.0f} s")
    print(f"{uses} uses of memory followed; {len(wrong)} configurations with findings")
    return bool(wrong)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*given, *(300, 0)[len(given) :]))
