"""Begins the record of this process's rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.rank_check.calls import Ended
from fsdpbench.script.rank_check.objects import record_objects
from fsdpbench.script.rank_check.recording import Recorder, Stacks
from fsdpbench.script.rank_check.values import Values
from fsdpbench.sim import Simulation


def start_recording(simulation: Simulation, folder: Path, rank_0: Path, own_files: OwnFiles) -> Recorder:
    """From now on write down what the simulation's rank calls; what rank 0 got is read in its folder. Told to
    end (SIGTERM), the process leaves its log in `folder`, with where it stood."""
    rank = simulation.rank
    values = Values() if rank == 0 else Values.read(rank_0)
    recorder = Recorder(rank, Stacks(own_files), values, simulation.accelerator.process_groups)
    recorder.install()
    record_objects(recorder)

    def told_to_end(number: int, frame: FrameType | None) -> None:
        recorder.log.stood = recorder.stacks.of_frame(frame)
        recorder.finish(folder, Ended.TIMEOUT)
        os._exit(1)

    signal.signal(signal.SIGTERM, told_to_end)
    return recorder
