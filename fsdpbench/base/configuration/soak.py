"""Soak tests: many consecutive steps with evaluation in between, to see memory over time (docs/lengths.md).

`--seq-lengths` sets the sequence lengths of each step:

    lognormal:900,0.8,layout=packed,buckets=16,seed=1        random
    lengths.txt,layout=padded,multiple=64                    one length per sample, from a file

A step has `batch` samples. If *padded*, its tensors have the shape [batch, longest]. If *packed*, the samples
are concatenated in one row. Rows are truncated to `seq` tokens.
"""

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.numbers import finite_number, whole_number
from fsdpbench.base.reading import UnreadableError, read_text

MOST_STEPS = 100_000
PADDED, PACKED = "padded", "packed"
LAYOUTS = (PADDED, PACKED)
MOST_LENGTHS = 1_000_000
MOST_FILE_BYTES = 64 << 20
_LOGNORMAL = "lognormal:"
_KEYS = ("layout", "buckets", "multiple", "least", "seed")
_HOW = "write lognormal:900,0.8 (mean tokens, sigma of the logarithm) or a file with one length a line"


@dataclass(frozen=True)
class LengthSettings:
    """Sample lengths (log-normal with `mean` tokens and `sigma`, or `values` of a file) and a step's padding.

    `buckets`: pad a step to the next of this many evenly spaced lengths. `multiple`: pad to a multiple.
    Both 0 or 1: do not pad further than the samples. `least`: the minimum length of a sample.
    """

    source: str
    mean: float | None = None
    sigma: float | None = None
    values: tuple[int, ...] = ()
    layout: str = PADDED
    buckets: int = 0
    multiple: int = 1
    least: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UsageError(f"--seq-lengths: layout={self.layout} is none of {', '.join(LAYOUTS)}")
        if (self.mean is None) == (not self.values):
            raise UsageError(f"--seq-lengths {self.source!r} says no lengths: {_HOW}")
        if self.mean is not None and not (1 <= self.mean <= 1e9 and 0 <= (self.sigma or 0) <= 5):
            raise UsageError(error_text("soak.drawn", self.source))
        for name, low, most in (("buckets", 0, 4096), ("multiple", 1, 1 << 20), ("least", 1, 1 << 30)):
            if not low <= getattr(self, name) <= most:
                raise UsageError(error_text("soak.bounds", name, getattr(self, name), low, most))
        if self.buckets and self.multiple > 1:
            raise UsageError("--seq-lengths: name buckets or multiple, not both: each says what is padded to")

    @classmethod
    def parse(cls, text: str) -> "LengthSettings":
        """Parse `--seq-lengths` as in the module's docstring. Raises `UsageError`, which names the wrong part
        and the right form."""
        words = [word.strip() for word in text.split(",")]
        sourced = [word for word in words if "=" not in word]
        layout, numbers = PADDED, dict[str, int]()
        for word in words:
            name, equals, value = (part.strip() for part in word.partition("="))
            if equals and name == "layout":
                layout = value
            elif equals:
                numbers[name] = _read(name, value)
        if not sourced or not sourced[0]:
            raise UsageError(f"--seq-lengths {text!r} names no lengths: {_HOW}")
        if sourced[0].startswith(_LOGNORMAL):
            mean, sigma = _lognormal(sourced)
            return cls(",".join(sourced), mean, sigma, values=(), layout=layout, **numbers)
        if len(sourced) > 1:
            raise UsageError(f"--seq-lengths: {sourced[1]!r} says nothing here; known are {', '.join(_KEYS)}")
        path = Path(sourced[0])
        return cls(path.name, values=read_lengths(path), layout=layout, mean=None, sigma=None, **numbers)

    def to_text(self) -> str:
        """Return the text that `parse` reads; a file is named without its folder."""
        fields = {spec.name: spec.default for spec in dataclasses.fields(self)}
        words = [f"{name}={getattr(self, name)}" for name in _KEYS if getattr(self, name) != fields[name]]
        return ",".join([self.source, *words])

    def draws(self, stream: str) -> Iterator[int]:
        """Yield sample lengths forever, the same for the same seed and `stream` ("train" or "eval")."""
        if self.values:
            while True:
                yield from self.values
        sigma = self.sigma or 0.0
        centre = math.log(self.mean or 1.0) - sigma * sigma / 2  # so that `mean` is the mean
        draw = random.Random(f"{self.seed} {stream}").gauss
        while True:
            yield max(1, round(math.exp(min(draw(centre, sigma), 40.0))))

    def shape(self, lengths: list[int], longest: int) -> tuple[int, int]:
        """Return rows and tokens per row of a step with samples of these lengths, truncated to `longest`."""
        taken = [max(length, self.least) for length in lengths]
        if self.layout == PACKED:
            return 1, self._padded(min(sum(taken), longest), longest)
        return len(taken), self._padded(min(max(taken), longest), longest)

    def _padded(self, length: int, most: int) -> int:
        if self.buckets:
            bucket = -(-length * self.buckets // most)
            return -(-bucket * most // self.buckets)
        return min(-(-length // self.multiple) * self.multiple, most)


def _read(name: str, value: str) -> int:
    if name not in _KEYS:
        raise UsageError(f"--seq-lengths: unknown {name!r}; known are {', '.join(_KEYS)}")
    try:
        return whole_number(value, 0)
    except ValueError as error:
        raise UsageError(f"--seq-lengths: {name}={value}: {error}") from None


def _lognormal(words: list[str]) -> tuple[float, float]:
    numbers = [words[0].removeprefix(_LOGNORMAL), *words[1:]]
    try:
        mean, sigma = map(finite_number, numbers)
    except ValueError:
        raise UsageError(f"--seq-lengths {','.join(words)!r}: {_HOW}") from None
    return mean, sigma


def read_lengths(path: Path) -> tuple[int, ...]:
    """Return the whole numbers in a file, one per line (blank lines are skipped). Raises `UsageError`."""
    try:
        lines = read_text(path, MOST_FILE_BYTES).splitlines()
    except UnreadableError as error:
        raise UsageError(f"--seq-lengths {error}; {_HOW}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(whole_number(line.strip(), 1))
        except ValueError:
            raise UsageError(error_text("soak.line", path, number, line.strip()[:40])) from None
    if not 1 <= len(found) <= MOST_LENGTHS:
        raise UsageError(error_text("soak.count", path, len(found), MOST_LENGTHS))
    return tuple(found)


class StepShape(NamedTuple):
    """The shape of one step: rows and tokens of each microbatch. `evaluates`: run only the forward."""

    evaluates: bool
    microbatches: tuple[tuple[int, int | None], ...]

    @property
    def tokens(self) -> int | None:
        """Return the total number of tokens including padding; None for models without sequences."""
        if any(tokens is None for _, tokens in self.microbatches):
            return None
        return sum(rows * (tokens or 0) for rows, tokens in self.microbatches)


@dataclass(frozen=True)
class SoakSettings:
    """`steps` training steps; after every `eval_every` steps (0: never), `eval_steps` evaluation batches."""

    steps: int
    lengths: "LengthSettings | None" = None
    eval_every: int = 0
    eval_steps: int = 8

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("eval_every", 0), ("eval_steps", 1)):
            value, flag = getattr(self, name), "soak" if name == "steps" else name.replace("_", "-")
            if not least <= value <= MOST_STEPS:
                raise UsageError(f"--{flag} {value}: must be from {least} to {MOST_STEPS:,}")

    def schedule(self, batch: int, grad_accum: int, longest: int | None) -> Iterator[StepShape]:
        """Yield the steps in order, including evaluation; a sample has at most `longest` tokens."""
        training, evaluation = self._shapes("train", batch, longest), self._shapes("eval", batch, longest)
        for index in range(1, self.steps + 1):
            yield StepShape(False, tuple(next(training) for _ in range(grad_accum)))
            if self.eval_every and index % self.eval_every == 0:
                for _ in range(self.eval_steps):
                    yield StepShape(True, (next(evaluation),))

    def _shapes(self, stream: str, batch: int, longest: int | None) -> Iterator[tuple[int, int | None]]:
        lengths = self.lengths
        if lengths is None or longest is None:
            while True:
                yield batch, longest
        draws = lengths.draws(stream)
        while True:
            yield lengths.shape([next(draws) for _ in range(batch)], longest)

    def words(self) -> list[str]:
        """Return the command-line flags that give these settings."""
        words = ["--soak", str(self.steps)]
        if self.lengths is not None:
            words += ["--seq-lengths", self.lengths.to_text()]
        if self.eval_every:
            words += ["--eval-every", str(self.eval_every), "--eval-steps", str(self.eval_steps)]
        return words
