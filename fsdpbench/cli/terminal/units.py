"""Names and units of figures in printed text. Results always say GPU; on a CPU the text says rank."""

from collections.abc import Iterable

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import SETTINGS
from fsdpbench.reports.result import WIDE, Interval, Result, Span, Status

_OF_GOAL = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "tflops": "TFLOPS"}


def each(device: str) -> str:
    """Return the noun after the slash in a figure's unit: `GPU`, or `rank` on a CPU."""
    return "rank" if device == "cpu" else "GPU"


def goal_unit(goal: str, device: str) -> str:
    """Return the unit of a goal of `tune`, such as `tokens/s/GPU`; MFU has no unit."""
    return f"{_OF_GOAL[goal]}/{each(device)}" if goal in _OF_GOAL else goal.upper()


def plus_minus(interval: Interval | None, value: float | None, figure: str = "step_time_s") -> str:
    """Return the interval of a figure predicted as `value`: its half-width relative to its middle, ` ±7%`;
    both ends if it is wide, ` −58%/+140%`; empty without an interval."""
    if interval is None:
        return ""
    span: Span | None = getattr(interval, figure, None)
    low, high = span or interval.step_time_s
    half = (high - low) / (high + low)
    if half < WIDE or not value or not span:
        return f" ±{half:.0%}"
    return f" {low / value - 1:+.0%}/{high / value - 1:+.0%}".replace("-", "−")


def compiled_words(compiled: Iterable[bool | None]) -> str:
    """Return the kinds among configurations: `eager`, `compiled` or `eager and compiled`."""
    found = {bool(each) for each in compiled}
    return " and ".join(
        word for word, is_there in (("eager", False), ("compiled", True)) if is_there in found
    )


def headline(done: str, failed: int, left_s: float | None, racing: int = 0) -> str:
    """Return the counts of a sweep, as in `3/8 configurations, 1 failed, about 40 s left`."""
    text = f"{done} configurations"
    text += f", {failed} failed" if failed else ""
    text += f", {racing} with data races" if racing else ""
    return text if left_s is None else f"{text}, about {left_s:.0f} s left"


def best_words(found: Iterable[tuple[str, Result]], width: int | None = None) -> str:
    """Return the fastest of the configurations, in at most `width` columns; empty if none has figures."""
    rates = [
        (rate, name, result)
        for name, result in found
        if result.status is Status.OK and (rate := result.tokens_per_s_per_gpu) is not None
    ]
    if not rates:
        return ""
    rate, name, best = max(rates, key=lambda each: each[0])
    text = f"best so far: {rate:,.0f} tokens/s/{each(best.device)}, "
    text += f"{compiled_words([best.compiled])}, " if best.compiled is not None else ""
    return text + name if width is None else (text + name)[:width]


def settings_of(config: Config) -> dict[str, object]:
    """Return the settings of a configuration together with its system and number of GPUs."""
    return {"system": config.system, "gpus": config.gpus, **config.settings.to_dict()}


def words_of(config: Config, worlds: Iterable[int] = ()) -> str:
    """Return a configuration in words: its system, its batch, the settings that differ from defaults, and its
    number of GPUs if `worlds` differ."""
    from fsdpbench.reports.pages.display import phrase  # imports numpy

    settings = config.settings.to_dict()
    said = [config.system] + ([f"batch {settings['batch']}"] if settings.get("batch") else [])
    for name, each in SETTINGS.items():
        if name not in ("batch", "seq") and settings.get(name) not in (None, each.default):
            said.append(phrase(name, settings[name]))
    return ", ".join([*said, *[f"{config.gpus} GPUs"] * (len(set(worlds)) > 1)])


def is_shared(ranks: Iterable[int | None]) -> bool:
    """Return whether any rank occurs more than once."""
    known = [rank for rank in ranks if rank is not None]
    return len(set(known)) < len(known)


def interval_lines(intervals: Iterable[Interval | None], *, shared: bool, risky: bool) -> list[str]:
    """Return the lines below a table that explain ±, = (if ranks are `shared`) and `risky`."""
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return []
    reasons = dict.fromkeys(reason for interval in known for reason in interval.because)
    less = f" Less is known here: {'; '.join(reasons)}." if reasons else ""
    lines = [f"± is the 90 % interval; in differences, errors that both share cancel.{less}"]
    if shared:
        lines.append("Ranks with = cannot be distinguished.")
    if risky:
        lines.append("risky: memory fits only inside the prediction's error, or the allocator retries.")
    return lines
