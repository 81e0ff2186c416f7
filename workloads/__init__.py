"""Benchmarked models: named sizes, input data and FLOP counts.

    workload = get_workload("gpt-2.8b")
    model = workload.build(activation_checkpointing="full", seq=2048)
    inputs, targets = next(workload.batches(batch=8, seq=2048, seed=0, rank=0, device="cpu"))
    loss = model(inputs, targets)

Each family has one file for its shape and one for its modules; other packages add families by entry point.
The package imports no other package of fsdpbench, and imports torch only when a model is built.
"""

if __name__ == "workloads":
    from fsdpbench import stand_for

    stand_for(__name__)

from fsdpbench.workloads.base import BlockFlops, Flops, ForwardFlops, Workload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.registry import HF_PREFIX, PLUGINS, Family, families, get_workload, workload_names
from fsdpbench.workloads.shape import DataError, ShapeError, UnknownModelError, WorkloadError
