"""The names of the variations, as a configuration writes them."""

from __future__ import annotations

from enum import StrEnum


class Variation(StrEnum):
    """What is varied. Some take a number after `=` (`loader-time=0.05/4`)."""

    CHECKPOINT = "checkpoint"
    """Every wrapped unit computes its forward again in backward."""
    NO_CHECKPOINT = "no-checkpoint"
    """Nothing is computed again."""
    HALF_CHECKPOINT = "half-checkpoint"
    """Of what is checkpointed, every second one is not."""
    RESHARD = "reshard"
    """Units free their parameters after forward, whatever the script says."""
    KEEP = "keep"
    """Units keep their parameters from forward to backward."""
    HALF_BATCH = "half-batch"
    DOUBLE_BATCH = "double-batch"
    WRAP_BLOCKS = "wrap-blocks"
    """Each of the model's repeated blocks is a unit, and the model around them."""
    WRAP_ROOT = "wrap-root"
    """The module around all units is one, too."""
    WRAP_PAIRS = "wrap-pairs"
    """Two blocks in a row are one unit."""
    PREFETCH = "prefetch"
    """Forward prefetches the next unit; backward too, where that was switched off."""
    BACKWARD_PREFETCH = "backward-prefetch"
    """FSDP1: backward prefetches, as it does by default."""
    NO_FORWARD_PREFETCH = "no-forward-prefetch"
    LIMIT = "limit"
    NO_LIMIT = "no-limit"
    """FSDP1's rate limiter."""
    HYBRID = "hybrid"
    """Sharded inside a node, replicated over nodes."""
    BF16 = "bf16"
    """Parameters are gathered, and products computed, in bf16."""
    NO_OFFLOAD = "no-offload"
    """Shards stay on the GPU."""
    FUSED = "fused"
    """The optimizer's fused kernel."""
    NONE_GRADS = "none-grads"
    """`zero_grad` drops gradients."""
    COMPILE = "compile"
    """Every wrapped unit is compiled."""
    NO_WAITS = "no-waits"
    """The CPU does not wait where the script's own lines make it wait."""
    DETACH_KEPT = "detach-kept"
    """What is kept from step to step is detached from its graph."""
    HOST_KEPT = "host-kept"
    """It is moved to the host too."""
    LOADER_TIME = "loader-time"
    """A batch takes the host so many seconds: `loader-time=SECONDS/WORKERS`."""


class NoEffectError(RuntimeError):
    """A script ran, and there was nothing in it to vary."""

    def __init__(self, variation: Variation) -> None:
        super().__init__(f"the script has nothing that the variation {variation.value!r} could change")


def parse_variation(text: str) -> tuple[Variation, str]:
    """The variation that `text` names, and what follows its `=`."""
    name, _, value = text.partition("=")
    return Variation(name), value
