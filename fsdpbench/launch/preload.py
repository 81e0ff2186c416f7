"""Imported once by the fork server: everything a point needs, so that starting one costs a fork.

Nothing here may start threads or touch a device; the children do that.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.launcher.api
import torch.distributed.tensor
import torch.profiler

import fsdpbench.devices.cpu
import fsdpbench.devices.sim
import fsdpbench.launch.elastic
import fsdpbench.launch.point
import fsdpbench.sim
import impl  # noqa: F401

torch.set_num_threads(1)
fsdpbench.sim.preload()
gc.collect()
gc.freeze()
