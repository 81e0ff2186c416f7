"""A process with the simulated device that runs one training step for each line it reads and answers each.

Starting the device changes torch for the whole process, so that steps are timed from outside: a line each way
costs some ten microseconds, a step a hundred milliseconds.

    python stepping.py SYSTEM LAYERS GPUS
"""

from __future__ import annotations

import sys

import torch

from fsdpbench.base.configuration.config import Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.devices import make_device
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.measuring.soak import TrainingLoop
from fsdpbench.sim import preload
from fsdpbench.sweep.planning import make_config, make_target, without_absent
from fsdpbench.systems import BuildContext, get_system


def training_loop(system: str, layers: int, gpus: int) -> TrainingLoop:
    """GPT of the width of gpt-2.8b on simulated A100s."""
    target = make_target(
        model="gpt-2.8b",
        shape={"layers": layers},
        device="sim",
        hardware="a100-80gb",
        gpus=gpus,
        gpus_per_node=None,
        data=None,
        measurement=Measurement.default_for("sim"),
    )
    workload = target.workload()
    config = without_absent(make_config(target, system, Settings.of(batch=1), workload))
    device = make_device(config, Placement(rank=0, world_size=gpus, local_rank=0))
    device.open()
    model = get_system(system).wrap(BuildContext(config, workload, device.torch_device, True))
    batches = workload.batches(1, config.settings.seq, 0, 0, device.torch_device)
    optimizer = get_system(system).make_optimizer(model, config)
    loop = TrainingLoop(
        config, get_system(system), model, optimizer, batches, device.torch_device, lambda loss: None
    )
    device.settle()
    return loop


def main(system: str, layers: str, gpus: str) -> None:
    torch.set_num_threads(1)
    preload()
    torch.autograd.set_multithreading_enabled(False)
    loop = training_loop(system, int(layers), int(gpus))
    for _ in range(3):
        loop.step()
    print("ready", flush=True)
    for _ in sys.stdin:
        loop.step()
        print("stepped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
