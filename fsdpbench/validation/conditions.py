"""Published runs predicted as if something about them were not known.

What a chip, a network or a software without published runs adds to the error of a prediction is measured on
runs that have been published, by predicting them without what is known of it:

    KNOWN      as they were
    CHIP       the keys that were fitted to runs on their chip come from another chip (`held_out.py`)
    NETWORK    the packaged profile's network instead of the one that was stated
    SYSTEM     PyTorch's FSDP2 instead of its FSDP1, and the other way round
    SOFTWARE   today's software instead of that of their time
    MODEL      runs of models whose shape or settings had to be assumed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fsdpbench.files.toml_text import to_toml
from fsdpbench.files.whole_files import write_whole
from fsdpbench.results.residuals.widths import Condition
from fsdpbench.sim.model.profile import load_profile, stated_machine
from fsdpbench.sim.model.software import CURRENT, load_software
from fsdpbench.systems import get_system
from fsdpbench.validation.held_out import held_out_cases
from fsdpbench.validation.runs.case import Case, Network

_TODAYS = "torch-fsdp1"
_OTHER = {"torch-fsdp1": "torch-fsdp2", "torch-fsdp2": "torch-fsdp1"}
_RUN_OF_MODELS = ("FSDP paper, Fig 6a", "FSDP paper, Fig 6c", "FSDP paper, Fig 7a and 8a", "pytorch#104509")


def under(
    condition: Condition, cases: Sequence[Case], open_cases: Sequence[Case], folder: Path
) -> list[Case]:
    """The cases that `condition` changes, changed; profiles are written to `folder`.

    Compiled runs are predicted as they were alone: no interval rests on them in another condition.
    """
    if condition is Condition.KNOWN:
        return list(cases)
    cases = [case for case in cases if not case.settings.get("compile")]
    if condition is Condition.CHIP:
        return held_out_cases(cases, folder)
    if condition is Condition.NETWORK:
        return [
            dataclasses.replace(
                case, hardware=stated_machine(case.chip, load_profile(case.hardware).gpus_per_node)
            )
            for case in cases
            if case.chip and case.network is Network.STATED
        ]
    if condition is Condition.SYSTEM:
        return [
            dataclasses.replace(
                case, system=_OTHER[case.system], software=_on_one_stream(case.software, folder)
            )
            for case in cases
            if case.system in _OTHER
        ]
    if condition is Condition.SOFTWARE:
        return [
            dataclasses.replace(case, system=case.system if case.system in _OTHER else _TODAYS, software=None)
            for case in cases
            if case.software or get_system(case.system).software != CURRENT
        ]
    return [case for case in open_cases if case.group in _RUN_OF_MODELS]


def _on_one_stream(software: str | None, folder: Path) -> str | None:
    """`software` with collectives where the installed torch has them, as FSDP2 needs."""
    if software is None or not load_software(software).collectives.own_streams:
        return software
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{software}-one-stream.toml").resolve()
    head = {"base": software, "name": path.stem}
    write_whole(path, to_toml({**head, "collectives": {"own_streams": False}}))
    return str(path)
