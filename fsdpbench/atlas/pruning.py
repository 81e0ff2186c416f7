"""What cannot fit by arithmetic, so that it is not simulated. The bound is never above the truth.

Two moments of a step are counted, each by what a rank surely holds then:

    optimizer's step   parameters, gradients and AdamW's two states of its share       (sweep/arithmetic.py)
    loss               parameters and states of its share, the input of every block, the logits, and, where
                       nothing is resharded after forward, all gathered parameters; where nothing is
                       recomputed, the inputs of a block's first products too
"""

from __future__ import annotations

from fsdpbench.configuration.config import Config
from fsdpbench.sweep.arithmetic import state_bytes
from fsdpbench.workloads import get_workload

_SHARE_BEFORE_GRADIENTS = 12 / 16
"""AdamW's states and the parameters, of all that `state_bytes` counts."""
_HALF = 2
_FULL = 4
"""Logits are cast for the loss: both are there while they are."""
_KEEPS_GATHERED = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
_KEPT_OF_A_BLOCK = 3
"""Of tensors as wide as the model: the block's input, what attention and feed-forward project at first."""
_BLOCKS = ("layers", "d_model", "vocab")


def least_bytes(config: Config) -> int | None:
    """At least so many bytes the allocator needs for a step of `config`; None where that is not known."""
    step = state_bytes(config)
    if step is None:
        return None
    settings = config.settings
    if settings.param_dtype not in ("bf16", "fp16") or settings.optimizer == "sgd":
        return step
    workload = get_workload(config.model, shape=dict(config.shape_given) or None)
    loss = int(step * _SHARE_BEFORE_GRADIENTS)
    if settings.strategy in _KEEPS_GATHERED and settings.reshard_after_forward is None:
        loss += _HALF * workload.parameters
    if all(name in workload.shape for name in _BLOCKS) and settings.seq:
        layers, width, vocab = (int(workload.shape[name]) for name in _BLOCKS)
        kept = _KEPT_OF_A_BLOCK if settings.activation_checkpointing == "none" else 1
        logit = _HALF + (_FULL if workload.shape.get("fp32_loss") else 0)
        loss += settings.batch * settings.seq * (_HALF * kept * layers * width + logit * vocab)
    return max(step, loss)
