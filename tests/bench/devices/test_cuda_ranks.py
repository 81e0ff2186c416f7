"""The CUDA device in a real rank; collected only where a GPU is."""

import pytest

from fsdpbench.base.configuration.config import Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.records import Status
from fsdpbench.sweep.planning import make_config, make_target, without_absent


@pytest.fixture
def cuda_config():
    target = make_target(
        model="gpt-tiny",
        shape={},
        device="cuda",
        hardware=None,
        gpus=1,
        gpus_per_node=None,
        data=None,
        measurement=Measurement(1, 2, 2, timeout_s=240),
    )
    return without_absent(make_config(target, "torch-fsdp2", Settings.of(batch=2), target.workload()))


def test_one_gpu(cuda_config, launch):
    launched = launch(cuda_config)
    assert launched.outcome.status is Status.OK
    (record,) = launched.records
    assert len(record.losses) == 5
    assert len(record.memory_per_step) == 2
    assert 0 < record.memory_per_step[0]["allocated"] <= record.memory_per_step[0]["reserved"]
    trace = launched.trace(0)
    assert {event.get("cat") for event in trace["traceEvents"]} >= {"kernel", "cuda_runtime", "cpu_op"}
    assert [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
