"""A soak: many steps on end, evaluation between them, to see what memory does over time (docs/lengths.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdpbench.base.configuration.lengths import LengthSettings
from fsdpbench.base.errors import UsageError

MOST_STEPS = 100_000


class StepShape(NamedTuple):
    """The shape of one step: rows and tokens of each microbatch. `evaluates`: forward alone."""

    evaluates: bool
    microbatches: tuple[tuple[int, int | None], ...]

    @property
    def tokens(self) -> int | None:
        """Tokens in all, padding included; None for models without sequences."""
        if any(tokens is None for _, tokens in self.microbatches):
            return None
        return sum(rows * (tokens or 0) for rows, tokens in self.microbatches)


@dataclass(frozen=True)
class SoakSettings:
    """`steps` training steps; after every `eval_every` (0: never) of them, `eval_steps` evaluated batches."""

    steps: int
    lengths: LengthSettings | None = None
    eval_every: int = 0
    eval_steps: int = 8

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("eval_every", 0), ("eval_steps", 1)):
            value, flag = getattr(self, name), "soak" if name == "steps" else name.replace("_", "-")
            if not least <= value <= MOST_STEPS:
                raise UsageError(f"--{flag} {value}: must be from {least} to {MOST_STEPS:,}")

    def schedule(self, batch: int, grad_accum: int, longest: int | None) -> Iterator[StepShape]:
        """Yield the steps in order, evaluation included; `longest` tokens a sample at most."""
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
        """Return the flags that ask for it."""
        words = ["--soak", str(self.steps)]
        if self.lengths is not None:
            words += ["--seq-lengths", self.lengths.to_text()]
        if self.eval_every:
            words += ["--eval-every", str(self.eval_every), "--eval-steps", str(self.eval_steps)]
        return words
