"""Comparison of numbers of GPUs: speed, duration and cost of the best configuration for each."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.base.numbers import with_unit
from fsdpbench.cli.output import make_console, make_table
from fsdpbench.cli.terminal.units import words_of
from fsdpbench.cli.values import Positive, grouped

if TYPE_CHECKING:
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.sweep.goodput import Endured
    from fsdpbench.sweep.planning import Target

_DAY_S = 86_400
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST_TOKENS = 1e18
_MOST_PRICE = 1_000_000
_MOST_HOURS = 1e12


budget_options = grouped(
    click.option("--tokens", metavar="N"),
    click.option("--price", type=Positive(_MOST_PRICE)),
    click.option("--gpu-mtbf", type=Positive(_MOST_HOURS)),
)
"""`--tokens`, `--price` and `--gpu-mtbf`."""


@dataclass(frozen=True)
class Budget:
    """The budget of a training run. tokens: number of training tokens. price: of a GPU-hour, in any currency.
    gpu_mtbf_h: mean GPU-hours between failures; None: the published value."""

    tokens: float | None = None
    price: float | None = None
    gpu_mtbf_h: float | None = None

    @classmethod
    def of(cls, tokens: str | None, price: float | None, gpu_mtbf: float | None) -> "Budget":
        """Return the budget of `--tokens` (as in `15T`), `--price` and `--gpu-mtbf`. Raises `UsageError`."""
        budget = cls(parse_tokens(tokens), price, gpu_mtbf)
        if gpu_mtbf is not None and tokens is None:
            raise UsageError("--gpu-mtbf changes the days of a training: name its --tokens, as in 300B")
        return budget

    def check(self, target: "Target") -> None:
        """Raise `UsageError` if the budget has tokens, but the model has none."""
        workload = target.workload()
        if self.tokens is not None and workload.tokens(1, workload.resolve_seq(None)) is None:
            raise UsageError(f"--tokens: {workload.name} has samples, not tokens; leave it out")


@dataclass(frozen=True)
class Row:
    """The best configuration on a number of GPUs. rate: tokens (or samples) per second of all GPUs.
    efficiency: rate per GPU relative to that of the fewest GPUs. days, gpu_hours, cost: to compute the
    budget's tokens; without tokens, cost is per day. endured: with checkpoints and failures, if known."""

    config: "Config"
    unit: str
    rate: float
    efficiency: float
    days: float | None
    gpu_hours: float | None
    cost: float | None
    endured: "Endured | None"

    @property
    def a_day(self) -> float:
        """Return the tokens (or samples) per day."""
        return self.rate * _DAY_S

    @property
    def days_in_all(self) -> float | None:
        """Return the days including checkpoints and failures; infinite if no time is left to train."""
        if self.days is None or self.endured is None:
            return None
        share = self.endured.waiting.share
        return self.days / share if share else math.inf

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON."""
        return {
            "gpus": self.config.gpus,
            "best": self.config.name,
            f"{self.unit}_per_s": self.rate,
            f"{self.unit}_per_day": self.a_day,
            "scaling_efficiency": self.efficiency,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "with_failures": None if self.endured is None else asdict(self.endured),
        }


def parse_tokens(text: str | None) -> float | None:
    """Return the number in `1T`, `300B`, `2e12`. Raises `UsageError`."""
    if text is None:
        return None
    try:
        count = float(with_unit(text, _SCALES))
    except ValueError:
        count = 0.0
    if not 1 <= count <= _MOST_TOKENS:
        raise UsageError(f"--tokens {text!r}: write a number of tokens, as in 300B or 1T")
    return count


def rows_by_count(found: "Iterable[tuple[Config, float]]", unit: str, budget: Budget) -> list[Row]:
    """Return the best row for each number of GPUs. `found`: configurations with their rates per GPU."""
    best: dict[int, tuple[Config, float]] = {}
    for config, rate in found:
        if config.gpus not in best or rate > best[config.gpus][1]:
            best[config.gpus] = (config, rate)
    fewest = best[min(best)][1] if best else 1.0
    return [
        row_of(config, rate, budget, fewest=fewest, unit=unit) for _, (config, rate) in sorted(best.items())
    ]


def row_of(config: "Config", each: float, budget: Budget, *, fewest: float = 1.0, unit: str = "") -> Row:
    """Return the row for a rate of `each` tokens or samples per second and GPU under a budget."""
    rate = config.gpus * each
    days = hours = cost = endured = None
    if budget.tokens is not None:
        from fsdpbench.sweep.goodput import endure

        days = budget.tokens / rate / _DAY_S
        hours = days * 24 * config.gpus
        endured = endure(config, budget.gpu_mtbf_h)
    if budget.price is not None:
        cost = budget.price * (24 * config.gpus if hours is None else hours)
    return Row(config, unit, rate, each / fewest, days, hours, cost, endured)


def is_wanted(rows: Sequence[Row], budget: Budget) -> bool:
    """Return whether the table adds anything to the ranking."""
    return bool(rows) and (len(rows) > 1 or budget != Budget())


def print_rows(rows: Sequence[Row], budget: Budget) -> None:
    """Print the table, and below it the best configuration for each number of GPUs."""
    from rich.text import Text

    console = make_console()
    unit = rows[0].unit
    head = ["GPUs", f"{unit}/s", f"{unit} a day", "efficiency"]
    head += ["days", "with failures", "GPU-hours"] if budget.tokens is not None else []
    head += ["cost" if budget.tokens is not None else "cost a day"] if budget.price is not None else []
    lines = []
    for row in rows:
        cells = [f"{row.config.gpus:,}", f"{row.rate:,.0f}", short(row.a_day), f"{row.efficiency:.0%}"]
        if budget.tokens is not None:
            cells += [amount(value) for value in (row.days, row.days_in_all, row.gpu_hours)]
        cells += [f"{row.cost:,.0f}"] if row.cost is not None else []
        lines.append(cells)
    console.print()
    purpose = "" if budget.tokens is None else f" for {short(budget.tokens)} tokens"
    console.print(Text(f"By number of GPUs, the fastest of each{purpose}:", style="bold"))
    console.print(make_table(dict.fromkeys(head, True), lines))
    for row in rows:
        console.print(Text(f"  {row.config.gpus:>6}  {words_of(row.config)}"))


def print_endured(rows: Sequence[Row]) -> None:
    """Print how checkpoints and failures prolong the fastest configuration; nothing without known days."""
    fastest = max(rows, key=lambda row: row.rate, default=None)
    if fastest is None or fastest.days is None:
        return
    from rich.text import Text

    console = make_console()
    words = {"row": fastest, "amount": amount, "span": span, "nan": math.nan}
    for line in rendered_beside(__file__, "by_count.jinja", **words).splitlines():
        console.print(Text(line))


def span(seconds: float) -> str:
    """Return a duration as `38 min`, in units from seconds to days."""
    for unit, size in (("days", _DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            count = seconds / size
            return f"{count:,.3g} {unit}" if count < 100 else f"{count:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def amount(value: float | None) -> str:
    """Return days, hours or money with few digits."""
    return "-" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def short(count: float) -> str:
    """Return a count as `1.03 T` or `97.6 B`."""
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:,.3g} {name}" if count < 1000 * scale else f"{count / scale:,.0f} {name}"
    return f"{count:,.3g}"
