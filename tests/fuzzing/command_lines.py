"""Command lines made from the commands' own options: some words right, some hostile, none missing by design.

What takes minutes when it is right is kept small: a tiny model, few points, ten seconds a configuration.
"""

from __future__ import annotations

import random
from typing import Any

import click
from hostile import TEXTS
from workshop import TINY

from fsdpbench.base.settings import SETTINGS, show_value
from fsdpbench.cli.group import command_named

FILES = (
    "run", "point", "baseline.json", "result.json", "space.toml", "thresholds.toml", "profile.toml",
    "trace.json.gz", "new", "no-such-file",
)  # fmt: skip
COMMANDS = {
    "run": 8, "sweep": 6, "plan": 6, "tune": 3, "analyze": 4, "report": 4, "compare": 4, "check": 3,
    "baseline": 2, "list": 2, "validate": 1, "calibrate": 1, "doctor": 1, "expect": 2, "no-such-command": 1,
}  # fmt: skip
_ON_MODELS = ("run", "sweep", "plan", "tune", "expect")
_SMALL = {
    "run": ["--timeout", "10"],
    "sweep": ["--timeout", "10", "--max-points", "1"],
    "plan": ["--timeout", "10", "--max-points", "2"],
    "tune": ["--timeout", "10", "--trials", "2", "--finalists", "1"],
    "validate": ["--only", "no such case"],
    "doctor": ["--quick"],
    "expect": ["--timeout", "10", "--measured", "1s"],
    "calibrate": ["--quick"],
}
_GOOD: dict[str, tuple[str, ...]] = {
    "when": ("strategy=HYBRID_SHARD => shard_size=2",), "exclude": ("batch=2 wrap=root",),
    "reference": ("single",), "assignments": ("batch=1", "wrap=root,block"), "only": ("no such case",),
    "against": ("point", "trace.json.gz"), "limits": ("depth=100", "unpacked=1MiB"), "leave_out": ("a",),
    "launcher": ("local",), "thresholds": ("thresholds.toml",), "baseline": ("baseline.json",),
    "finalists": ("1",), "trials": ("1", "2"), "model": ("gpt-125m", "gpt", "t5-11b", "regnet-9b"),
    "system": ("impl-fsdp1", "torch-fsdp2", "torch-ddp,single"), "gpus": ("1", "2", "8", "16", "7"),
    "gpus_per_node": ("1", "2", "8"), "device": ("sim", "cuda", "auto"),
    "preset": ("default", "memory", "wide", "scaling"), "timeout": ("10", "0.001"), "goal": ("mfu", "tflops"),
    "shape": ("layers=1", "layers=1,d_model=32,heads=1,vocab=64,max_seq=16"),
    "jitter": ("7", "seed=1,kernels=0.1"), "hardware": ("h100-80gb", "profile.toml"),
    "memory": ("80GB", "1GiB"), "form": ("md", "json", "csv"),
}  # fmt: skip
_GOOD_FILES = {
    "space": ("space.toml",),
    "folder": ("run",),
    "paths": ("run", "point", "trace.json.gz"),
    "before": ("run", "point", "baseline.json", "result.json"),
    "after": ("run", "point", "result.json"),
    "file": ("baseline.json", "new"),
    "what": ("models", "systems", "hardware", "settings"),
}
_NOT_TRIED = ("node_rank", "nnodes", "help")
"""Another machine would lead: waiting for it is what was asked for."""


def command_line(random_: random.Random) -> list[str]:
    """One case."""
    name = random_.choices(list(COMMANDS), weights=list(COMMANDS.values()))[0]
    found: Any = command_named(name)
    words = [name]
    spoilt = random_.choice((0.0, 0.2, 0.2, 0.6))
    if isinstance(found, click.Group):
        word = random_.choice([*found.commands, "nothing"])
        words, found = [name, word], found.commands.get(word)
    if found is None:
        return [*words, *(random_.choice(TEXTS) for _ in range(random_.randrange(3)))]
    if name in _ON_MODELS and random_.random() < 0.8:
        words += TINY
    given = [p for p in found.params if isinstance(p, click.Option) and p.name not in _NOT_TRIED]
    chosen = random_.sample(given, min(len(given), random_.choice((0, 1, 1, 2, 2, 3, 5))))
    for flag, value in _pairs(_SMALL.get(name, [])):
        if not any(flag in option.opts for option in chosen) or random_.random() < 0.5:
            words += [flag] if value is None else [flag, value]
    for option in chosen:
        words.append(random_.choice(option.opts))
        if not option.is_flag:
            words.append(_value(random_, option, spoilt))
    for argument in (p for p in found.params if isinstance(p, click.Argument)):
        if argument.name == "script_arguments":
            continue
        if argument.required or random_.random() < 0.3:
            words.append(_path(random_, argument.name or "", spoilt))
    if random_.random() < 0.05:
        words.insert(random_.randrange(len(words) + 1), random_.choice(TEXTS))
    return words


def _value(random_: random.Random, option: click.Option, spoilt: float) -> str:
    if random_.random() < spoilt:
        if random_.random() < 0.1:
            return ",".join(random_.choice(TEXTS) for _ in range(random_.randrange(2, 6)))
        return random_.choice(TEXTS)
    name = option.name or ""
    if name in _GOOD:
        return random_.choice(_GOOD[name])
    if name in SETTINGS:
        return random_.choice((show_value(SETTINGS[name].default), "none", "1", "2", "block", "fp32"))
    if isinstance(option.type, click.Choice):
        return str(random_.choice(option.type.choices))
    if isinstance(option.type, click.IntRange):
        return random_.choice(("1", "2"))
    return random_.choice(FILES)


def _path(random_: random.Random, name: str, spoilt: float) -> str:
    if random_.random() < spoilt:
        return random_.choice((*TEXTS, *FILES))
    return random_.choice(_GOOD_FILES.get(name, FILES))


def _pairs(words: list[str]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            found.append((word, None))
        else:
            found[-1] = (found[-1][0], word)
    return found
