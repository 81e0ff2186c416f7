"""The smallest model of every family learns real data."""

import pytest

from fsdpbench.workloads import get_workload


@pytest.mark.plain_cases("gpt", "regnet", "dhen")
def test_loss_falls_on_real_data(tiny, real_data, train):
    seq = None if tiny.default_seq is None else 32
    losses = train(tiny, 40, batch=8, seq=seq, data=real_data(tiny))
    assert sum(losses[-5:]) / 5 < 0.6 * max(losses[:2])


def test_a_language_model_starts_by_guessing_and_learns_letters(real_data, train):
    workload = get_workload("gpt-tiny")
    losses = train(workload, 40, batch=8, seq=32, data=real_data(workload))
    assert losses[0] > 6.0  # near ln 512
    assert sum(losses[-5:]) / 5 < 3.2
