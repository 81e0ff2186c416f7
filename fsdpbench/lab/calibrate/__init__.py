"""Measures a machine with GPUs and writes the hardware profile that simulates it."""

from fsdpbench.lab.calibrate.calibration import Calibration, calibrate
from fsdpbench.lab.calibrate.machine import Machine, base_for, cuda_machine, packaged, simulated_machine
