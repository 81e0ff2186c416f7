"""The command that repeats one configuration."""

from __future__ import annotations

import shlex
from contextlib import suppress

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.script_source import ScriptSource, StepsBy
from fsdpbench.configuration.settings import SETTINGS, show_value
from fsdpbench.sim.model.profile import ProfileError, load_profile


def node_stated(hardware: str | None, gpus: int, per_node: int, used: int | None) -> dict[str, int]:
    """`gpus_per_node` and `gpus_used_per_node` as one states them to get the same nodes for any `gpus`."""
    whole = per_node
    with suppress(ProfileError):
        whole = load_profile(hardware).gpus_per_node if hardware is not None else per_node
    ranks = used or per_node
    return {"gpus_per_node": whole} | ({"gpus_used_per_node": ranks} if ranks < min(whole, gpus) else {})


def nodes_of(config: Config) -> dict[str, int]:
    """The same of a configuration."""
    return node_stated(config.hardware, config.gpus, config.gpus_per_node, config.gpus_used_per_node)


def run_command(config: Config) -> str:
    """`fsdpbench run ...` with every setting that is not at its default; can be pasted into a shell."""
    if config.script is not None:
        return _script_command(config, config.script)
    words = ["fsdpbench", "run", "--model", config.model]
    if config.shape_given:
        words += ["--shape", ",".join(f"{name}={show_value(v)}" for name, v in config.shape_given.items())]
    words += ["--system", config.system, "--device", config.device]
    if config.hardware is not None:
        words += ["--hardware", config.hardware]
    words += _nodes(config)
    if config.data is not None:
        words += ["--data", config.data]
    for name, value in config.settings.to_dict().items():
        if value is not None and value != SETTINGS[name].default:
            words += ["--set", f"{name}={show_value(value)}"]
    return shlex.join([*words, *_of_simulation(config)])


def _nodes(config: Config) -> list[str]:
    words = ["--gpus", str(config.gpus)]
    for name, value in nodes_of(config).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *["--emulate"] * config.emulate]


def _of_simulation(config: Config) -> list[str]:
    words = [] if config.jitter is None else ["--jitter", config.jitter.to_text()]
    if config.software is not None:
        words += ["--software", config.software]
    if config.soak is not None:
        words += config.soak.words()
    return [*words, "--sanitize"] if config.sanitize else words


def _script_command(config: Config, script: ScriptSource) -> str:
    words = [
        "fsdpbench",
        "run",
        *(("--module", script.module) if script.module else ("--script", script.path)),
    ]
    words += ["--hardware", str(config.hardware)]
    words += _nodes(config)
    if script.steps_by is not StepsBy.OPTIMIZER:
        words += ["--steps-by", script.steps_by.value]
    if script.to_the_end:
        words.append("--to-the-end")
    if script.check_ranks:
        words += ["--check-ranks", str(len(script.check_ranks))]
    words += _of_simulation(config)
    if script.arguments:
        words += ["--", *script.arguments]
    return shlex.join(words)
