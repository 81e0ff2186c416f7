"""Rules for what a script does whatever its settings: some of it cannot be simulated otherwise, and is told
alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdpbench.advise.candidate import NOT_SIMULATED, Candidate, Kind, place_of


def habits(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    """What is wrong in a script, or costs time for nothing."""
    yield from _untrained(seen)
    if found := seen.get("backward_in_autocast"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "backward runs inside of autocast: torch advises against it, since backward's operators take "
            "the types of forward's by themselves",
            f"outside of the `with torch.autocast(...)` block: {found['text']}",
        )
    if found := seen.get("launch_blocking"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "CUDA_LAUNCH_BLOCKING=1: the CPU waits for every kernel, and nothing is done beside another",
            "without it; it is for finding errors",
        )
    if found := seen.get("anomaly"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "autograd looks for NaN in every gradient, and the CPU waits for each answer",
            f"without it; it is for finding errors: {found['text']}",
        )
    if found := seen.get("zeroed"):
        yield Candidate(
            "none-grads",
            Kind.FAULT,
            place_of(found),
            "gradients are filled with zeros and added to, where dropping them costs nothing",
            "zero_grad(set_to_none=True), the default",
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
    )


def _untrained(seen: Mapping[str, Any]) -> Iterator[Candidate]:
    """Why nothing is trained, or each rank by itself: one reason."""
    if made := seen.get("early_optimizer"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.WRONG,
            place_of(made),
            f"the optimizer is made before the model is wrapped (line {made['wrapped_at']}): it holds "
            "parameters that training no longer uses, and trains nothing",
            f"after the model is wrapped: {made['text']}",
        )
    elif found := seen.get("never_reduced"):
        yield _never_reduced(found)
    elif found := seen.get("without_gradients"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.WRONG,
            place_of(found),
            "no parameter of the optimizer has a gradient as it steps: it trains nothing",
            "give it the parameters that forward uses; step() after backward() and before zero_grad()",
        )


def _never_reduced(found: Mapping[str, Any]) -> Candidate:
    """Of gradients that stay each rank's own."""
    if "no_sync" in found["text"]:
        write = "the last backward before optimizer.step() outside of no_sync()"
    else:
        name = found["text"].partition("(")[0].rpartition(".")[2]
        write = f"model.{name}(True) before the last backward of a step"
    return Candidate(
        NOT_SIMULATED,
        Kind.WRONG,
        place_of(found),
        "gradients are reduced over the ranks in no step: this switches it off, and nothing switches it on",
        write,
    )
