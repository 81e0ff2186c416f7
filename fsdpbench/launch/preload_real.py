"""What points on real devices need besides, imported by the fork server where such are to come."""

from __future__ import annotations

import gc

import fsdpbench.devices.cpu
import fsdpbench.launch.elastic  # noqa: F401

gc.freeze()
