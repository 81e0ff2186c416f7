"""Several numbers of GPUs: what the best configuration of each gives, takes and costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.base.numbers import with_unit
from fsdpbench.cli.output import make_console, make_table
from fsdpbench.cli.values import Positive, grouped

if TYPE_CHECKING:
    from fsdpbench.workloads import Workload
_DAY_S = 86_400
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST_TOKENS = 1e18
_MOST_PRICE = 1_000_000


budget_options = grouped(
    click.option("--tokens", metavar="N"),
    click.option("--price", type=Positive(_MOST_PRICE)),
)
"""`--tokens` and `--price`."""


@dataclass(frozen=True)
class Budget:
    """The budget of a training. tokens: number to train on. price: of a GPU-hour, in any currency."""

    tokens: float | None = None
    price: float | None = None

    @classmethod
    def of(cls, tokens: str | None, price: float | None) -> Budget:
        """Return the budget that `--tokens` (as `15T`) and `--price` name. Raises `UsageError`."""
        return cls(parse_tokens(tokens), price)

    def check(self, workload: Workload) -> None:
        """Raise `UsageError` if tokens are asked of a model that has none."""
        if self.tokens is not None and workload.tokens(1, workload.resolve_seq(None)) is None:
            raise UsageError(f"--tokens: {workload.name} has samples, not tokens; leave it out")


@dataclass(frozen=True)
class Row:
    """The best configuration on `gpus` GPUs. rate: tokens (or samples) a second, all GPUs together.
    efficiency: rate a GPU against that of the fewest GPUs. days, gpu_hours, cost: for the budget's tokens;
    cost without tokens is that of a day."""

    gpus: int
    name: str
    words: str
    unit: str
    rate: float
    efficiency: float
    days: float | None
    gpu_hours: float | None
    cost: float | None

    @property
    def a_day(self) -> float:
        """Return the tokens (or samples) of 24 hours."""
        return self.rate * _DAY_S

    def to_dict(self) -> dict[str, str | float | None]:
        """Return the row as JSON holds it."""
        return {
            "gpus": self.gpus,
            "best": self.name,
            f"{self.unit}_per_s": self.rate,
            f"{self.unit}_per_day": self.a_day,
            "scaling_efficiency": self.efficiency,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
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


def rows_by_count(found: Iterable[tuple[int, str, str, float]], unit: str, budget: Budget) -> list[Row]:
    """Return the best row of each number of GPUs. `found`: GPUs, name, words, rate a GPU of each."""
    best: dict[int, tuple[str, str, float]] = {}
    for gpus, name, words, rate in found:
        if gpus not in best or rate > best[gpus][2]:
            best[gpus] = (name, words, rate)
    fewest = best[min(best)][2] if best else 1.0
    return [
        row_of(gpus, rate, budget, name=name, words=words, fewest=fewest, unit=unit)
        for gpus, (name, words, rate) in sorted(best.items())
    ]


def row_of(
    gpus: int,
    each: float,
    budget: Budget,
    *,
    name: str = "",
    words: str = "",
    fewest: float = 1.0,
    unit: str = "",
) -> Row:
    """Return what a rate of `each` tokens or samples a second and GPU means for a budget."""
    rate = gpus * each
    days = None if budget.tokens is None else budget.tokens / rate / _DAY_S
    hours = None if days is None else days * 24 * gpus
    cost = None
    if budget.price is not None:
        cost = budget.price * (24 * gpus if hours is None else hours)
    return Row(gpus, name, words, unit, rate, each / fewest, days, hours, cost)


def is_wanted(rows: Sequence[Row], budget: Budget) -> bool:
    """Return whether the table says more than the ranking does."""
    return bool(rows) and (len(rows) > 1 or budget != Budget())


def print_rows(rows: Sequence[Row], budget: Budget) -> None:
    """Print the table, and below it the best configuration of each number of GPUs."""
    from rich.text import Text

    console = make_console()
    unit = rows[0].unit
    head = ["GPUs", f"{unit}/s", f"{unit} a day", "efficiency"]
    head += ["days", "GPU-hours"] if budget.tokens is not None else []
    head += ["cost" if budget.tokens is not None else "cost a day"] if budget.price is not None else []
    lines = []
    for row in rows:
        cells = [f"{row.gpus:,}", f"{row.rate:,.0f}", short(row.a_day), f"{row.efficiency:.0%}"]
        cells += [amount(value) for value in (row.days, row.gpu_hours) if value]
        cells += [f"{row.cost:,.0f}"] if row.cost is not None else []
        lines.append(cells)
    console.print()
    purpose = "" if budget.tokens is None else f" for {short(budget.tokens)} tokens"
    console.print(Text(f"By number of GPUs, the fastest of each{purpose}:", style="bold"))
    console.print(make_table(dict.fromkeys(head, True), lines))
    for row in rows:
        console.print(Text(f"  {row.gpus:>6}  {row.words}"))


def amount(value: float | None) -> str:
    """Return days, hours or money in few digits."""
    return "-" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def short(count: float) -> str:
    """Return a count as `1.03 T` or `97.6 B`."""
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:,.3g} {name}" if count < 1000 * scale else f"{count / scale:,.0f} {name}"
    return f"{count:,.3g}"
