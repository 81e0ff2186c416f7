"""The CPU device in real ranks: what it measures and what its traces hold."""

import pytest

from fsdpbench.engine.results.records import Status
from fsdpbench.launch.elastic import run_elastic

# The launcher forks ranks beside its own threads; they start afresh and take no lock of its.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SPANS = {"forward", "backward", "optimizer", "ProfilerStep#1", "ProfilerStep#2"}


@pytest.fixture(scope="module")
def two_ranks(cpu_config, launched_type, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    return launched_type(run_elastic(cpu_config(), folder), folder)


def test_record_and_trace_of_every_rank(two_ranks):
    assert two_ranks.outcome.status is Status.OK
    assert [record.rank for record in two_ranks.records] == [0, 1]
    for rank, record in enumerate(two_ranks.records):
        assert record.trace == f"trace/rank{rank}_trace.json.gz"
        assert len(record.losses) == 5  # one a step: warm-up, timed and traced
        assert all(0 < loss < 10 for loss in record.losses)
        assert record.memory_per_step is None
        assert record.peak_flops is None
        assert record.hardware["simulated"] is False
        assert len(record.profiler_step_times_s) == 2


def test_a_step_takes_what_the_slowest_rank_takes(two_ranks):
    first, second = (record.step_times_s for record in two_ranks.records)
    assert first == second
    assert len(first) == 2
    assert min(first) > 0


def test_ranks_train_on_different_data(two_ranks):
    first, second = (record.losses for record in two_ranks.records)
    assert first != second


@pytest.mark.parametrize("rank", [0, 1])
def test_trace_holds_the_steps_and_their_communication_only(two_ranks, rank):
    trace = two_ranks.trace(rank)
    assert trace["distributedInfo"]["rank"] == rank
    assert trace["distributedInfo"]["world_size"] == 2
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert names >= SPANS
    assert "gloo:all_gather" in names
    # What the device itself does around a timed step is no part of the training.
    assert not [name for name in names if "barrier" in name]
    assert not [path.name for path in two_ranks.folder.rglob("*partial*")]


def test_world_of_one(cpu_config, launch):
    launched = launch(cpu_config("single", gpus=1))
    assert launched.outcome.status is Status.OK
    assert len(launched.records) == 1
    assert len(launched.records[0].losses) == 5


@pytest.mark.campaign
def test_the_same_configuration_computes_the_same(cpu_config, launch):
    losses = []
    for _ in range(2):
        launched = launch(cpu_config("torch-ddp"))
        assert launched.outcome.status is Status.OK
        losses.append([record.losses for record in launched.records])
    assert losses[0] == losses[1]


def test_gradient_accumulation_records_every_microbatch(cpu_config, launch):
    launched = launch(cpu_config("torch-ddp", grad_accum=2, grad_sync="last"))
    assert launched.outcome.status is Status.OK
    assert len(launched.records[0].losses) == 10
    assert launched.records[0].samples_per_step == 4
