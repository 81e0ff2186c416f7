"""Named spaces: the default, and answers to common questions.

default        common settings, each changed alone, with every checkpointing at a batch that fits
memory         settings that trade memory: batch, checkpointing, strategy, rate limiter
accumulation   microbatches per step, with a reduction in each of them or only in the last one
scaling        the same work per GPU on more and more GPUs, sharded over all or inside nodes
hybrid         the number of ranks that share one copy
wide           all of it together, thousands of points: for `tune`, or with --max-points
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fsdpbench.base.errors import unknown
from fsdpbench.base.settings import SETTINGS, Value
from fsdpbench.sweep.spaces.space import Rule

DEFAULT_SYSTEMS = ("torch-fsdp2", "impl-fsdp2")
TORCHS = ("torch-fsdp2", "torch-fsdp1")
SYSTEM_ALONE = ("impl-fsdp2",)
"""The system if settings are named but no system; `run` uses it too."""
REFERENCE_SYSTEMS = ("torch-ddp",)
CHECKPOINTING, _WITHOUT_CHECKPOINTING = "activation_checkpointing", ("wrap", "forward_prefetch")
Lists = Mapping[str, list[Value]]


@dataclass(frozen=True)
class Preset:
    """The lists and rules of a space; `gpus` if the space has its own GPU counts.

    Each of the `references` runs once, with the first value of every list, in addition to the swept systems.
    """

    lists: Lists
    when: tuple[Rule, ...] = ()
    gpus: tuple[int, ...] = ()
    systems: tuple[str, ...] = field(default=DEFAULT_SYSTEMS)
    references: tuple[str, ...] = ()
    exclude: tuple[Rule, ...] = ()


def get_preset(name: str, device: str, gpus: int, gpus_per_node: int) -> Preset:
    """Return the preset `name` for a device and a world. Raises `UsageError` with similar names."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, "fsdpbench sweep --help")
    preset = PRESETS[name](device, gpus, gpus_per_node)
    if device != "cpu":
        return preset
        # CPUs emulate half precision, so the default there is fp32.
    lists = {name: values for name, values in preset.lists.items() if name != "reduce_dtype"}
    return replace(preset, lists={"param_dtype": ["fp32"], **lists}, references=())


def of_what_is_named(device: str, gpus: int, gpus_per_node: int) -> Preset:
    """Return the preset that varies only what the user names: one system, one value of other settings."""
    preset = get_preset("default", device, gpus, gpus_per_node)
    fixed = {name: values for name, values in preset.lists.items() if len(values) == 1}
    return Preset(fixed, systems=SYSTEM_ALONE)


def _default(device: str, gpus: int, gpus_per_node: int) -> Preset:
    lists = _lists("default", device, CHECKPOINTING)
    if device == "cpu":  # there is no caching allocator to put under pressure
        return Preset(lists)
    lists["strategy"] = ["FULL_SHARD", "HYBRID_SHARD" if gpus > gpus_per_node else "SHARD_GRAD_OP"]
    changed = {name: tuple(values[1:]) for name, values in lists.items() if name != CHECKPOINTING}
    pairs = itertools.combinations(changed.items(), 2)
    alone = [Rule(dict(pair)) for pair in pairs if pair[0][1] and pair[1][1]]
    alone += [Rule({name: changed[name], CHECKPOINTING: ("op", "full")}) for name in _WITHOUT_CHECKPOINTING]
    alone += [Rule({"compile": (True,), CHECKPOINTING: ("full",)})]  # compiling takes longest
    alone += [Rule({"compile": (True,), CHECKPOINTING: ("op",), "system": SYSTEM_ALONE})]
    return Preset(lists, exclude=tuple(alone), references=REFERENCE_SYSTEMS)


def _accumulation(device: str, gpus: int, gpus_per_node: int) -> Preset:
    # With one microbatch per step the reduction cannot be delayed.
    later = Rule({"grad_accum": (2, 4, 8)}, {"grad_sync": ("every", "last")})
    return Preset(_lists("accumulation", device, "grad_accum", "strategy"), (later,))


def _scaling(device: str, gpus: int, gpus_per_node: int) -> Preset:
    """Vary the number of GPUs: simulated worlds grow beyond `gpus`, real ones end there."""
    if device == "sim":
        counts = tuple(gpus * 2**k for k in range(5))
    else:
        counts = (*(2**k for k in range(gpus.bit_length()) if 2**k < gpus), gpus)
    several_nodes = tuple(count for count in counts if count > gpus_per_node)
    inside = Rule({"gpus": several_nodes}, {"strategy": ("FULL_SHARD", "HYBRID_SHARD")})
    return Preset(_lists("scaling", device), (inside,) if several_nodes else (), counts)


def _hybrid(device: str, gpus: int, gpus_per_node: int) -> Preset:
    sizes = tuple(size for size in range(2, gpus) if gpus % size == 0 and size & (size - 1) == 0)
    hybrid = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    shared = Rule({"strategy": hybrid}, {"shard_size": sizes})
    return Preset(_lists("hybrid", device), (shared,) if sizes else ())


def _wide(device: str, gpus: int, gpus_per_node: int) -> Preset:
    """Vary speed and memory, but not what is computed: neither dtypes nor the number of microbatches."""
    lists = _lists("wide", device, "batch", "wrap", "strategy", "activation_checkpointing")
    if gpus > gpus_per_node:
        lists["strategy"].append("HYBRID_SHARD")
    ahead = Rule({"backward_prefetch": ("pre", "post")}, {"backward_prefetch_depth": (1, 2)})
    return Preset(lists, (ahead,), systems=TORCHS)


def _lists(preset: str, device: str, *outermost: str) -> dict[str, list[Value]]:
    """Return a preset's lists from the table of settings: `outermost` first, then in the table's order."""
    swept = {}
    for name in dict.fromkeys((*outermost, *SETTINGS)):
        sweep = SETTINGS[name].sweep
        if values := sweep.get(f"{preset}/{device}", sweep.get(preset, ())):
            swept[name] = list(values)
    return swept


PRESETS: dict[str, Callable[[str, int, int], Preset]] = {
    "default": _default,
    "memory": lambda device, *_: Preset(_lists("memory", device, "batch", "activation_checkpointing")),
    "accumulation": _accumulation,
    "scaling": _scaling,
    "hybrid": _hybrid,
    "wide": _wide,
}
