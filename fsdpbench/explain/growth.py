"""Memory that grows from step to step: how long it lasts, and what stops it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdpbench.configuration.what_if import WhatIf
from fsdpbench.explain.changes import Change
from fsdpbench.script.variations.kinds import Variation
from fsdpbench.sweep.trials import Trial

_SOON = 100_000
"""Steps: growth that memory stands for longer does not matter."""


def steps_until_full(account: Mapping[str, Any]) -> int | None:
    """After how many steps memory is full at the rate that was seen; None where it does not grow."""
    growth = account.get("growth") or {}
    each = growth.get("per_step_bytes")
    if not each:
        return None
    left = account["free_bytes"] + account["unused_bytes"]
    return len(growth["at_step_ends_bytes"]) + max(0, left) // int(each)


def grows(trial: Trial) -> bool:
    """Whether memory is full soon, however it fits now."""
    steps = steps_until_full(trial.account or {})
    return steps is not None and steps < _SOON


def stops() -> list[Change]:
    """What may stop the growth that a script shows, the less first."""
    return [
        Change(
            ".detach() what the loop keeps (a list, a sum)",
            "what is kept no longer holds the graph of its step",
            fields=(("what_if", WhatIf(variation=Variation.DETACH_KEPT)),),
        ),
        Change(
            ".detach().cpu() what the loop keeps (a list, a sum)",
            "what is kept is on the host; the time of the copy is not simulated",
            fields=(("what_if", WhatIf(variation=Variation.HOST_KEPT)),),
            unpriced=True,
        ),
    ]
