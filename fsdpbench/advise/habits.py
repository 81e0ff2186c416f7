"""Rules for what a script does whatever its settings: some of it cannot be simulated otherwise, and is told
alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdpbench.advise.candidate import NOT_SIMULATED, Candidate, Kind, place_of
from fsdpbench.advise.edits import Edit


def habits(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    """What is wrong in a script, or costs time for nothing."""
    if found := seen.get("backward_in_autocast"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "backward runs inside of autocast: torch advises against it, since backward's operators take "
            "the types of forward's by themselves",
            f"outside of the `with torch.autocast(...)` block: {found['text']}",
            "the end of the block is yours to move",
        )
    if found := seen.get("launch_blocking"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "CUDA_LAUNCH_BLOCKING=1: the CPU waits for every kernel, and nothing is done beside another",
            "without it; it is for finding errors",
            (Edit(found, "without"),) if found["file"] else "it is in the environment",
        )
    if found := seen.get("anomaly"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "autograd looks for NaN in every gradient, and the CPU waits for each answer",
            f"without it; it is for finding errors: {found['text']}",
            (Edit(found, "without"),),
        )
    if found := seen.get("zeroed"):
        yield Candidate(
            "none-grads",
            Kind.FAULT,
            place_of(found),
            "gradients are filled with zeros and added to, where dropping them costs nothing",
            "zero_grad(set_to_none=True), the default",
            (Edit(found, "keyword", ("set_to_none", "True")),),
        )
    if norms := seen.get("norms"):
        yield _single_norms(norms, seen.get("waits") or ())


def _single_norms(norms: Mapping[str, Any], waits: Sequence[Mapping[str, Any]]) -> Candidate:
    waiting = any(wait["file"] == norms["file"] and wait["line"] == norms["line"] for wait in waits)
    return Candidate(
        "no-waits" if waiting else NOT_SIMULATED,
        Kind.FAULT,
        place_of(norms),
        f"{norms['per_step']:,.0f} norms a step are taken one by one"
        + (", and the CPU waits for each" if waiting else ""),
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which takes all at the same time",
        "the lines around it belong to it",
    )
