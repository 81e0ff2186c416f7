"""Published runs predicted as if something about them were not known.

What a chip, a network or a software without published runs adds to the error of a prediction is measured on
runs that have been published, by predicting them without what is known of it:

    KNOWN      as they were
    CHIP       the keys that were fitted to runs on their chip come from another chip (`held_out.py`)
    NETWORK    the packaged profile's network in place of the one that was stated
    SYSTEM     PyTorch's FSDP2 in place of its FSDP1, and the other way round, with today's software
    SOFTWARE   PyTorch's FSDP1 as installed in place of the software of their time
    MODEL      runs of models whose shape or settings had to be assumed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fsdpbench.results.residuals.table import Condition
from fsdpbench.sim.software import CURRENT
from fsdpbench.systems import get_system
from fsdpbench.validation.case import Case, Network
from fsdpbench.validation.held_out import held_out_cases

_TODAYS = "torch-fsdp1"
_OTHER = {"torch-fsdp1": "torch-fsdp2", "torch-fsdp2": "torch-fsdp1"}
_RUN_OF_MODELS = ("FSDP paper, Fig 6a", "FSDP paper, Fig 6c", "FSDP paper, Fig 7a and 8a", "pytorch#104509")


def under(
    condition: Condition, cases: Sequence[Case], open_cases: Sequence[Case], folder: Path
) -> list[Case]:
    """The cases that `condition` changes, changed; profiles are written to `folder`."""
    if condition is Condition.KNOWN:
        return list(cases)
    if condition is Condition.CHIP:
        return held_out_cases(cases, folder)
    if condition is Condition.NETWORK:
        return [
            dataclasses.replace(case, hardware=case.chip)
            for case in cases
            if case.chip and case.network is Network.STATED
        ]
    if condition is Condition.SYSTEM:
        return [
            dataclasses.replace(case, system=_OTHER[case.system]) for case in cases if case.system in _OTHER
        ]
    if condition is Condition.SOFTWARE:
        return [
            dataclasses.replace(case, system=_TODAYS, software=None)
            for case in cases
            if case.software or get_system(case.system).software != CURRENT
        ]
    return [case for case in open_cases if case.group in _RUN_OF_MODELS]
