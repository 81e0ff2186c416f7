"""Goodput: the share of a long training that is not spent on checkpoints, lost to failures or on restarts.

    bytes of a checkpoint ──storage of the profile──> seconds of saving ──┐
    GPUs, mean GPU-hours between failures ──────────> seconds between ────┴──> best interval, goodput

Failures arrive at a constant random rate (a Poisson process), also while saving and restarting. With d
seconds of saving after each t seconds of work, R of restarting and M between failures, t seconds of work take
M e^(R/M) (e^((t+d)/M) - 1) on average (Daly, FGCS 22, 2006). The minimum is at (1 - t/M) e^((t+d)/M) = 1.
"""

import math
from dataclasses import dataclass

from fsdpbench.base.configuration.config import DEFAULT_HARDWARE, Config, shard_size_of
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sweep.prediction import saved_bytes

GPU_MTBF_H = 50_000.0
"""Published GPU-hours between failures: 419 unexpected interruptions in 54 days of 16,384 H100 (Llama 3,
arXiv 2407.21783) are one in 50,700."""
RESTART_S = 600.0
"""Seconds from a failure to the next step, without reading the checkpoint. Estimated: the same training lost
less than 10 % of its time, which is 19 minutes per failure including recomputed steps."""

_PLAN_S = 85e-6
"""Seconds that rank 0 plans for each tensor of each rank while the others wait. Measured on a CPU: torch 2.11
and 2.13 read, merge and send back the plans of 8 to 256 ranks with 300 and 900 tensors in 65 to 110 us each.
With cached plans (`enable_plan_caching`) this is needed only once."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: parameters and optimizer states of all ranks, `nbytes` in total. copy_s: to the hosts,
    all ranks in parallel. write_s: from hosts to storage; reading takes as long. plan_s: planning of torch's
    distributed checkpoints before that, if the number of tensors is known."""

    nbytes: int
    copy_s: float
    write_s: float
    plan_s: float = 0.0

    def blocked_s(self, *, is_async: bool) -> float:
        """Return the seconds that training waits; `is_async`: without the writing."""
        return self.plan_s + self.copy_s + (0.0 if is_async else self.write_s)


@dataclass(frozen=True)
class Goodput:
    """Goodput with a checkpoint every `interval_s` of training. share: of the time that trains. blocked_s:
    wait for one checkpoint. failure_s: mean time between failures of all GPUs."""

    share: float
    interval_s: float
    blocked_s: float
    failure_s: float


@dataclass(frozen=True)
class Endured:
    """Goodput of a training that waits for each checkpoint (`waiting`), or writes it `in_background`."""

    checkpoint: Checkpoint
    waiting: Goodput
    in_background: Goodput
    gpu_mtbf_h: float


def endure(config: Config, gpu_mtbf_h: float | None = None) -> Endured | None:
    """Return the goodput of a training with checkpoints and a failure every `gpu_mtbf_h` GPU-hours; None for
    a script and for a model whose states are unknown. Raises `ProfileError`."""
    checkpoint, hours = _checkpoint_of(config), gpu_mtbf_h or GPU_MTBF_H
    if checkpoint is None:
        return None
    failure_s = hours * 3600 / config.gpus
    waiting, in_background = (best_goodput(checkpoint, failure_s, is_async=each) for each in (False, True))
    return Endured(checkpoint, waiting, in_background, hours)


def best_goodput(checkpoint: Checkpoint, failure_s: float, *, is_async: bool = False) -> Goodput:
    """Return the goodput with the best interval between checkpoints.

    is_async: training waits only for the copy. A failure before the file is complete goes back to the
    previous checkpoint, which costs `write_s` more. The next save starts after the file is complete."""
    from scipy.special import lambertw

    blocked_s = checkpoint.blocked_s(is_async=is_async)
    lost_s = RESTART_S + checkpoint.write_s * (2 if is_async else 1)
    interval_s = failure_s * (1 + lambertw(-math.exp(-1 - blocked_s / failure_s)).real)
    if is_async:
        interval_s = max(interval_s, checkpoint.write_s)
    return Goodput(_share(interval_s, blocked_s, lost_s, failure_s), interval_s, blocked_s, failure_s)


def sharded_checkpoint(
    nbytes: int, rank_nbytes: float, tensors: int, hardware: str | None, gpus: int
) -> Checkpoint:
    """Return a checkpoint that all ranks write: `nbytes` in total, `rank_nbytes` copied per rank. tensors:
    per rank, 0 if unknown. Raises `ProfileError`."""
    profile = load_profile(hardware or DEFAULT_HARDWARE)
    nodes, storage = math.ceil(gpus / profile.gpus_per_node), profile.storage
    rate = min(nodes * storage.gb_s_per_node, storage.gb_s or 20.0 * math.ceil(nodes / 32))
    copy_s = rank_nbytes / (profile.host_link.gb_s * 1e9)
    return Checkpoint(nbytes, copy_s, nbytes / (rate * 1e9), _PLAN_S * tensors * gpus)


def full_checkpoint(nbytes: int, hardware: str | None) -> Checkpoint:
    """Return a checkpoint that one rank copies and writes. Raises `ProfileError`."""
    profile = load_profile(hardware or DEFAULT_HARDWARE)
    rate = min(profile.storage.gb_s_per_node, profile.storage.gb_s or math.inf)
    return Checkpoint(nbytes, nbytes / (profile.host_link.gb_s * 1e9), nbytes / (rate * 1e9))


def _checkpoint_of(config: Config) -> Checkpoint | None:
    nbytes = saved_bytes(config)
    if nbytes is None:
        return None
    shard = nbytes / max(shard_size_of(config) * config.settings.tp, 1)
    return sharded_checkpoint(nbytes, shard, 0, config.hardware, config.gpus)


def _share(interval_s: float, blocked_s: float, lost_s: float, failure_s: float) -> float:
    """Return the share of the time that trains; 0 if failures come before anything is saved."""
    exponent = (interval_s + blocked_s) / failure_s
    if exponent + lost_s / failure_s > math.log(1e12):
        return 0.0
    return interval_s / (failure_s * math.exp(lost_s / failure_s) * math.expm1(exponent))
