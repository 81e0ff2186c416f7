"""What the CUDA device says before a GPU is needed."""

import pytest
import torch

from fsdpbench.base.errors import BenchError
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.devices.real import CudaDevice


def test_a_rank_without_a_gpu_is_told_so(cpu_config):
    beyond = torch.cuda.device_count()
    device = CudaDevice(cpu_config(), Placement(rank=beyond, world_size=beyond + 1, local_rank=beyond))
    with pytest.raises(
        BenchError, match=f"rank {beyond} needs GPU {beyond} of its machine, where {beyond} are"
    ):
        device.open()
    device.close()
