"""Verdicts on a trace, and what the table of settings has against the causes that they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from fsdpbench.base.settings import all_trades
from fsdpbench.reports.analysis.records import Record


class Outcome(StrEnum):
    """FOUND: something costs time that a setting may save.  FINE: nothing worth a setting.  CANNOT_TELL."""

    FOUND = "found"
    FINE = "fine"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True)
class Suggestion(Record):
    """A setting to try next, by the bench's name for it, and its value."""

    setting: str
    value: str


@dataclass(frozen=True)
class Finding(Record, share="share_of_step", gain="predicted_gain", suggestions="try"):
    """One rule that applied.

    cause: the rule's name.  share: part of the step that it costs (0 to 1).  gain: the most that the
    suggestions can save of the step (0 to 1), None where the trace does not tell.  text: a sentence.
    """

    cause: str
    share: float
    gain: float | None
    text: str
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True)
class Verdict(Record):
    """A sentence that says it all, and findings in order of what they cost."""

    outcome: Outcome
    sentence: str
    findings: tuple[Finding, ...] = ()

    @property
    def texts(self) -> list[str]:
        """Return a sentence a cause, in order of what they cost; where there are none, why."""
        return [finding.text for finding in self.findings] or [self.sentence]


def remedies(cause: str) -> tuple[Suggestion, ...]:
    """Return the settings that help against `cause`, in the table's order."""
    if cause == "blocking":
        return (Suggestion("system", "impl-fsdp2"),)
    return tuple(
        Suggestion(setting.name, trade.written) for setting, trade in all_trades() if cause in trade.against
    )


def in_torch(verdict: Verdict) -> Iterator[str]:
    """Yield everything that a verdict suggests, as a script with torch's FSDPs writes it, the most costly
    cause first, each once: for traces of programs that are not ours."""
    written = {
        (setting.name, trade.written): trade.script for setting, trade in all_trades() if trade.against
    }
    asked = ((each.setting, each.value) for finding in verdict.findings for each in finding.suggestions)
    yield from dict.fromkeys(words for each in asked if (words := written.get(each)))
