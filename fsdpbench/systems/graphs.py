"""The setting `graph`: which configurations no CUDA graph of a step can hold, known before anything runs."""

from __future__ import annotations

from fsdpbench.configuration.config import Config


def refuse_graph(config: Config) -> dict[str, str]:
    """Why the step of `config` cannot be captured: setting -> reason. What depends on the program itself is
    found as it runs (`sim/graph`)."""
    settings = config.settings
    if settings.graph == "none":
        return {}
    why = None
    if config.device != "sim":
        why = f"it is a what-if of simulated GPUs, not of {config.device}: --device sim"
    elif settings.compile:
        why = "compiled blocks have graphs of their own, which are not nested here: leave compile out"
    elif settings.optimizer in ("adamw-foreach", "adamw-loop"):
        why = f"{settings.optimizer} counts its steps on the host, a graph would repeat one: use adamw"
    elif settings.optimizer_dtype is not None:
        why = "this AdamW counts its steps on the host, a graph would repeat one: leave optimizer_dtype"
    elif settings.cpu_offload:
        why = "the optimizer of offloaded shards runs on the host: leave cpu_offload out"
    elif config.sanitize or config.soak is not None:
        other = "--sanitize" if config.sanitize else "--soak"
        why = f"{other} follows steps that run by themselves: leave one of them out"
    elif config.software is not None:
        why = f"the trainer of software {config.software} is not watched: leave --software out"
    return {} if why is None else {"graph": why}
