"""What it means that a configuration ended in another way than before.

| before \\\\ after | ok | oom | not applicable | any failure | no result |
|---|---|---|---|---|---|
| ok | its figures | worse | worse | worse | cannot judge |
| oom | better | equal | cannot judge | worse | cannot judge |
| not applicable | better | cannot judge | equal | worse | cannot judge |
| any failure | better | cannot judge | cannot judge | cannot judge | cannot judge |
| not there | added | added | added | added, and failed | cannot judge |

Failures are error, crash, timeout, race and rank mismatch. Out of memory and not applicable are answers, a
failure is not. So a failure that was not there before is a regression, and of what failed before nothing is
known that could have become worse.
"""

from __future__ import annotations

from enum import StrEnum

from fsdpbench.results.records import Status


class Verdict(StrEnum):
    """What one change means, the most pressing first. UNKNOWN: it cannot be judged. NOISE: no change that the
    runs can show."""

    WORSE = "worse"
    UNKNOWN = "unknown"
    BETTER = "better"
    CHANGED = "changed"
    ALLOWED = "allowed"
    NOISE = "noise"


def outcome(before: Status, after: Status) -> Verdict | None:
    """The verdict on how a configuration ended; None where there is no change, and its figures tell."""
    if before is after and before.is_answer:
        return None
    if after is Status.OK:
        return Verdict.BETTER
    if before is Status.OK or (before.is_answer and not after.is_answer):
        return Verdict.WORSE
    return Verdict.UNKNOWN
