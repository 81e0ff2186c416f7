"""The advice in words, and as plain values."""

import textwrap
from collections.abc import Iterator

from fsdpbench.answers.advise.advisor import GROUPS, Advice, Tried
from fsdpbench.answers.advise.candidates import Kind

_MOST_POSSIBLE = 6
_MUCH = 0.1
_NOTHING = 0.0005
_WIDTH = 80


def describe_advice(advice: Advice) -> str:
    """Return the advice as lines of at most 80 columns; lines of the script stay as they are."""
    return "\n".join(line for text in _lines(advice) for line in _wrapped(text))


def describe_fitting(each: Tried) -> str:
    """Return the mix of blocks with which a script fits that runs out of memory, as such lines."""
    lines = ("By unit, against the script with memory enough:", *_numbered(1, each))
    return "\n".join(line for text in lines for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    is_code = text.startswith("    ") and text[4:5] in "+-@"
    indent = "    " if text.startswith((" ", "No ", "Too ", "Not ", "Do ", "Could ")) else ""
    return (
        [text] if is_code else textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False)
    )


def _lines(advice: Advice) -> Iterator[str]:
    tried = len(advice.advice) + len(advice.possible) + len(advice.nothing)
    if advice.advice:
        yield "Advice; gains are simulated, and the real one is in the brackets in 9 of 10 cases:"
        for number, each in enumerate(advice.advice, 1):
            yield from _numbered(number, each)
    else:
        yield f"No advice: nothing is wrong with the script, and none of {tried} variants is worth a change."
    for each in advice.no_effect:
        setting = f"{each.candidate.what} ({each.candidate.place})"
        yield f"No effect: {setting} changes neither time nor memory here."
    if advice.possible:
        yield "Faster too, at a price:"
        for each in advice.possible[:_MOST_POSSIBLE]:
            tight = " (memory is tight)" if each.trial.risky else ""
            yield f"  {gain_words(each)}: {each.candidate.write}{tight}"
    others = [each for each in advice.nothing if each.more]
    compared = [each for each in advice.nothing if each.gain is not None]
    small = [each for each in compared if (each.gain or 0.0) >= _NOTHING]
    slower = [each for each in compared if each not in small]
    bounded = [each for each in advice.nothing if each.candidate.most is not None]
    without = [each for each in advice.nothing if each.gain is None and each not in (*bounded, *others)]
    unfit = [each for each in without if each.trial.status.value == "oom"]
    failed = [each for each in without if each.trial.status.value != "oom"]
    for said, found in (("Too little gain to change it", small), ("No gain", slower)):
        if found:
            yield f"{said}: " + ", ".join(f"{_name(e)} ({e.gain:+.1%})" for e in found)
    if bounded:
        most = max(each.candidate.most or 0.0 for each in bounded)
        names = ", ".join(map(_name, bounded))
        yield f"Not simulated, since so little of a step waits that they gain {most:.1%} at most: {names}"
    for each in others:
        more = f"{abs(each.more)} parameters {'more' if each.more > 0 else 'fewer'}"
        yield f"Not compared: {each.candidate.variation} trains {more} than the script"
    if unfit:
        yield "Do not fit: " + ", ".join(map(_name, unfit))
    if failed:
        yield "Could not be tried: " + ", ".join(map(_name, failed))


def _name(each: Tried) -> str:
    return each.candidate.variation.partition("=")[0]


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
    """`12.3 % faster [6, 19]`."""
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
