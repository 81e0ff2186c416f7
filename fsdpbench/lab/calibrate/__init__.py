"""Measures a machine with GPUs and writes the hardware profile that simulates it."""

from fsdpbench.lab.calibrate.calibration import Calibration, calibrate
from fsdpbench.lab.calibrate.machine import Machine, cuda_machine, simulated_machine
