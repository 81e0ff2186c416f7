"""Imports of the fork server for points on real devices, where such are to come."""

from __future__ import annotations

import gc

import fsdpbench.engine.devices.cpu
import fsdpbench.launch.elastic  # noqa: F401

gc.freeze()
