"""The advice as text and as plain values."""

import textwrap
from collections.abc import Iterator, Sequence

from fsdpbench.answers.advise.advisor import GROUPS, Advice, Tried
from fsdpbench.answers.advise.candidates import Kind
from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.reports.result import Status

_HEAD = "Advice; gains are simulated, and the real one is in the brackets in 9 of 10 cases:"
_MUCH = 0.1
_NOTHING = 0.0005
_WIDTH = 80


def describe_advice(advice: Advice) -> str:
    """Return the advice as text of at most 80 columns; lines of the script are not wrapped."""
    groups = _groups(advice.nothing)
    rest = rendered_beside(__file__, "text.jinja", advice=advice, groups=groups, gain_words=gain_words)
    numbered = [line for place, each in enumerate(advice.advice, 1) for line in _numbered(place, each)]
    lines = [_HEAD, *numbered] if numbered else []
    return "\n".join(line for text in (*lines, *rest.splitlines()) for line in _wrapped(text))


def describe_fitting(each: Tried) -> str:
    """Return, as text, the mix of blocks with which an out-of-memory script fits."""
    lines = ("By unit, against the script with memory enough:", *_numbered(1, each))
    return "\n".join(line for text in lines for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    is_code = text.startswith("    ") and text[4:5] in "+-@"
    indent = "    " if text.startswith((" ", "No ", "Too ", "Not ", "Do ", "Could ")) else ""
    return (
        [text] if is_code else textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False)
    )


def _groups(nothing: Sequence[Tried]) -> dict[str, list[Tried]]:
    """Group the candidates that were tried without success by the reason."""
    groups: dict[str, list[Tried]] = {
        name: [] for name in ("others", "bounded", "small", "slower", "unfit", "failed")
    }
    for each in nothing:
        if each.more:
            groups["others"].append(each)
        if each.gain is not None:
            groups["small" if each.gain >= _NOTHING else "slower"].append(each)
        elif each.candidate.most is not None:
            groups["bounded"].append(each)
        elif not each.more:
            groups["unfit" if each.trial.status is Status.OOM else "failed"].append(each)
    return groups


def _numbered(number: int, each: Tried) -> Iterator[str]:
    candidate = each.candidate
    place = f"{candidate.place}: " if candidate.place else ""
    less = f", {each.saves:.0%} less memory".replace("%", " %") if each.saves >= _MUCH else ""
    gain = "wrong" if candidate.kind is Kind.WRONG else gain_words(each)
    yield f"{number:>2}. {gain}{less}: {place}{candidate.what}"
    first, *code = candidate.write.splitlines()
    yield f"    write: {first}"
    if each.diff:
        yield from (
            f"    {line}" for line in each.diff.splitlines() if not line.startswith(("---", "+++", " "))
        )
    else:
        yield f"    no diff: {each.no_diff}"
        yield from (f"    + {line}" for line in code)


def gain_words(each: Tried) -> str:
    """Return the gain as text, such as `12.3 % faster [6, 19]`."""
    if each.gain is None or each.paired is None:
        return "not simulated"
    low, high = 100 * each.paired.low, 100 * each.paired.high
    if abs(each.gain) < _NOTHING:
        return f"as fast [{low:.0f}, {high:.0f}]"
    text = f"{100 * abs(each.gain):.1f} % {'faster' if each.gain >= 0 else 'slower'}"
    if each.gain >= 1:
        text = f"{1 + each.gain:.1f} x as fast"
        return f"{text} [{1 + low / 100:.1f}, {1 + high / 100:.1f}]"
    return f"{text} [{low:.0f}, {high:.0f}]"


def as_dict(advice: Advice) -> dict[str, object]:
    """Return the advice as plain values."""
    return {"simulated": True, "level": 0.9} | {name: [*map(entry, getattr(advice, name))] for name in GROUPS}


def entry(each: Tried) -> dict[str, object]:
    """Return one candidate as plain values."""
    candidate = each.candidate
    named = ("variation", "kind", "place", "what", "write")
    return {
        **{name: str(getattr(candidate, name)) for name in named},
        "diff": each.diff or None,
        "no_diff": each.no_diff or None,
        "trains_more": each.more,
        "gain": each.gain,
        "gain_at_most": candidate.most,
        "memory_saved": each.saves,
        "interval": each.paired and [each.paired.low, each.paired.high],
        "status": each.trial.status.value,
        "cause": each.trial.cause,
        "step_time_s": each.trial.step_time_s,
        "peak_reserved_bytes": each.trial.reserved,
        "risky": each.trial.risky,
    }
