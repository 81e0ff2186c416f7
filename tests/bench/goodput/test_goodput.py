"""Goodput against trainings that really fail: random failures drawn one by one, and published ones."""

from __future__ import annotations

import random

import pytest

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Settings
from fsdpbench.sweep.goodput import (
    RESTART_S,
    Checkpoint,
    best_goodput,
    endure,
    full_checkpoint,
    sharded_checkpoint,
)
from fsdpbench.sweep.prediction import PROBE

CASES = [
    (Checkpoint(10**9, 2.0, 30.0), 3_600.0),
    (Checkpoint(10**12, 20.0, 200.0), 4_000.0),
    (Checkpoint(10**12, 5.0, 60.0), 100_000.0),
]


def model(name: str, gpus: int, **settings: object) -> Config:
    chosen = Settings.of(batch=1, **settings)
    return Config(name, {}, "torch-fsdp2", "sim", "h100-80gb", gpus, 8, chosen, PROBE)


def drawn_share(checkpoint: Checkpoint, failure_s: float, interval_s: float, *, is_async: bool) -> float:
    """Return the share of time that trains, of 4,000 intervals kept, with every failure drawn."""
    draw = random.Random(7)
    blocked_s = checkpoint.copy_s if is_async else checkpoint.copy_s + checkpoint.write_s
    now = kept = safe = 0.0
    written_at = 0.0  # the moment at which everything in `kept` is on storage
    fails_at = draw.expovariate(1 / failure_s)
    while kept < 4_000 * interval_s:
        ends = now + interval_s + blocked_s
        if is_async:
            ends = max(ends, written_at)
        if ends <= fails_at:
            now, safe, kept = ends, kept, kept + interval_s
            written_at = now + checkpoint.write_s if is_async else now
            continue
        if fails_at < written_at:
            kept, written_at = safe, 0.0
        now = fails_at + RESTART_S + checkpoint.write_s
        fails_at += draw.expovariate(1 / failure_s)
        while fails_at < now:  # failures while it restarts begin that again
            now = fails_at + RESTART_S + checkpoint.write_s
            fails_at += draw.expovariate(1 / failure_s)
    return kept / now


@pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "in the background"])
@pytest.mark.parametrize(("checkpoint", "failure_s"), CASES)
def test_the_share_is_that_of_drawn_failures(
    checkpoint: Checkpoint, failure_s: float, is_async: bool
) -> None:
    best = best_goodput(checkpoint, failure_s, is_async=is_async)
    drawn = drawn_share(checkpoint, failure_s, best.interval_s, is_async=is_async)
    assert best.share == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize(("checkpoint", "failure_s"), CASES)
def test_no_other_interval_is_better(checkpoint: Checkpoint, failure_s: float) -> None:
    best = best_goodput(checkpoint, failure_s)
    for factor in (0.3, 0.6, 1.6, 3.0):
        other = drawn_share(checkpoint, failure_s, best.interval_s * factor, is_async=False)
        assert other < best.share


def test_the_training_of_llama_3_kept_more_than_nine_tenths() -> None:
    """405B on 16,384 H100: "higher than 90 % effective training time" (arXiv 2407.21783, section 3.3.4)."""
    endured = endure(model("llama3-405b", 16_384))
    assert endured is not None
    assert 0.90 < endured.waiting.share < endured.in_background.share < 0.96
    assert endured.waiting.failure_s / 3600 == pytest.approx(54 * 24 / 419, rel=0.02)


def test_failures_faster_than_restarts_leave_nothing() -> None:
    assert best_goodput(Checkpoint(10**12, 5.0, 60.0), 10.0).share == 0


def test_states_in_two_bytes_are_a_smaller_checkpoint() -> None:
    full = endure(model("gpt-tiny", 8))
    narrow = endure(model("gpt-tiny", 8, optimizer_dtype="bf16"))
    assert full is not None
    assert narrow is not None
    assert narrow.checkpoint.nbytes * 12 == full.checkpoint.nbytes * 8


def test_nodes_write_together_until_storage_is_full() -> None:
    one = sharded_checkpoint(8 * 10**9, 10**9, 100, "h100-80gb", 8)
    assert one.write_s == pytest.approx(8 / 4), "a node writes 4 GB/s"
    many = sharded_checkpoint(10**12, 10**9, 100, "h100-80gb", 256)
    assert many.write_s == pytest.approx(1000 / 20), "32 nodes write 20 GB/s"
    assert many.plan_s == pytest.approx(32 * one.plan_s), "each rank's plan goes to rank 0"
    assert full_checkpoint(8 * 10**9, "h100-80gb").write_s == pytest.approx(8 / 4)
