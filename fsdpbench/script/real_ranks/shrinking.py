"""Shrinking of a script's model: by its arguments and configuration classes, and by lists of equal blocks.

Widths are divided by one power of two and head counts by another, so that divisibility is kept. Steps,
batches and sequences become short too. Values that are small already stay. If a vocabulary is
shrunk, a token's row is its number modulo the remaining rows, in embeddings and in losses. A script that
fails with shorter lists, such as one that counts its experts itself, runs again with whole lists.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsdpbench.base.files.documents import table_beside
from fsdpbench.script.interposing import around, around_init

_TABLES = table_beside(__file__, "shrinking.toml")
_WIDTHS, _HEADS, _HEAD_DIM, _VOCABULARY, _OFTEN = (
    re.compile(_TABLES["names"][kind], re.IGNORECASE)
    for kind in ("widths", "heads", "head_dim", "vocabulary", "often")
)
_MOST = {re.compile(each["names"], re.IGNORECASE): int(each["most"]) for each in _TABLES["most"]}
_WIDTH = 64
SHORTENED = " blocks "  # in notes on shorter lists
_BLOCKS, _FEW = 2, 4
"""Blocks kept of a list of more than a few."""


class Shrinking:
    """The shrinking of a script's model in this process, with `notes` about it; lists of blocks keep their
    length if they are to stay `whole`."""

    def __init__(self, notes: set[str], saves: bool, whole: bool = False) -> None:
        self.notes, self._saves = notes, saves
        self._rows: dict[int, int] = {}
        """The original size of a vocabulary by its shrunk size."""
        around(nn.functional, "embedding", self._looking_up)
        around_init(nn.Embedding, self._padding)
        for loss in ("cross_entropy", "nll_loss"):
            around(nn.functional, loss, self._choosing)
        around(argparse.ArgumentParser, "parse_known_args", self._parsing)
        around(dataclasses, "dataclass", self._dataclass)
        if not whole:
            around(nn.ModuleList, "__init__", self._listing)
        if "transformers" in sys.modules:
            self._configurations(sys.modules["transformers"].PretrainedConfig)

    def _parsing(self, original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
        found, rest = original(parser, *args, **kwargs)
        self._change(found)
        return found, rest

    def _dataclass(self, original: Callable[..., Any], cls: Any = None, /, **kwargs: Any) -> Any:
        made = original(cls, **kwargs)
        return self._of_model(made) if cls is not None else lambda each: self._of_model(made(each))

    def _of_model(self, kind: Any) -> Any:
        names = [each.name for each in dataclasses.fields(kind)]
        saves = any(_is_interval(kind.__name__, name) for name in names)
        if saves or any(_WIDTHS.fullmatch(name) or name.endswith("batch_size") for name in names):
            self._configurations(kind)
        return kind

    def _configurations(self, kind: Any) -> None:
        """Make the objects of a configuration class shrink as soon as they are created."""

        def init(original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            self._change(made)

        around(kind, "__init__", init)

    def _change(self, made: Any) -> None:
        numbers = {name: value for name, value in vars(made).items() if type(value) is int and value > 0}
        smaller = shrunk(numbers, type(made).__name__ if self._saves else None)
        for name, value in smaller.items():
            object.__setattr__(made, name, value)
            self.notes.add(f"{name} {numbers[name]:,} -> {value:,}")
            if _VOCABULARY.fullmatch(name):
                self._rows[value] = max(numbers[name], self._rows.get(value, 0))

    def _folded(self, tokens: Any, rows: int, ignored: int | None = None) -> Any:
        """Return tokens of a vocabulary shrunk to `rows` as numbers of these rows; others unchanged."""
        if not isinstance(tokens, torch.Tensor | int) or rows not in self._rows:
            return tokens
        known = torch.as_tensor(tokens)
        if known.is_floating_point() or not known.numel() or not rows <= known.max() < self._rows[rows]:
            return tokens
        folded = torch.where((known < 0) | (known == ignored), known, known % rows)
        return folded if isinstance(tokens, torch.Tensor) else int(folded)

    def _looking_up(self, original: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self._folded(input, weight.shape[0]), weight, *args, **kwargs)

    def _choosing(self, original: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        rows = input.shape[min(1, input.ndim - 1)]
        return original(input, self._folded(target, rows, kwargs.get("ignore_index")), *args, **kwargs)

    def _padding(self, rows: int, kwargs: Any) -> None:
        kwargs["padding_idx"] = self._folded(kwargs.get("padding_idx"), rows)

    def _listing(self, original: Any, made: Any, modules: Iterable[nn.Module] | None = None) -> None:
        original(made, modules if modules is None else self._few(list(modules)))

    def _few(self, blocks: list[nn.Module]) -> list[nn.Module]:
        """Return the first of many equal blocks; other lists unchanged."""
        kinds = {(type(each), *(tuple(p.shape) for p in each.parameters())) for each in blocks}
        if len(blocks) <= _FEW or len(kinds) > 1:
            return blocks
        self.notes.add(f"{_BLOCKS} of {len(blocks)}{SHORTENED}{type(blocks[0]).__name__}")
        return blocks[:_BLOCKS]


def _is_interval(kind: str, name: str) -> bool:
    return bool(_OFTEN.fullmatch(name) or _OFTEN.fullmatch(f"{kind}_{name}"))


def shrunk(numbers: Mapping[str, int], kind: str | None = None) -> dict[str, int]:
    """Return the values that become smaller, from a model's sizes by name; for a class named `kind`, also
    the steps between its savings."""
    found = {
        name: most
        for pattern, most in _MOST.items()
        for name, value in numbers.items()
        if value > most and pattern.fullmatch(name)
    }
    if kind is not None:
        found |= {name: 1 for name, value in numbers.items() if value > 1 and _is_interval(kind, name)}
    heads = {name: value for name, value in numbers.items() if _HEADS.fullmatch(name)}
    each = {name: value for name, value in numbers.items() if _HEAD_DIM.fullmatch(name)}
    widths = {name: value for name, value in numbers.items() if _WIDTHS.fullmatch(name) and name not in each}
    if not widths or min(widths.values()) <= _WIDTH:
        return found
    by_heads = _power(list(heads.values()), lambda factor: min(heads.values()) >= factor)
    narrowest = min(widths.values())
    by_width = _power(
        list(widths.values()),
        lambda factor: (
            factor == 1
            or (
                narrowest // factor >= _WIDTH // 2
                and all(narrowest // factor % (2 * count // by_heads) == 0 for count in heads.values())
            )
        ),
    )
    found |= {name: value // by_heads for name, value in heads.items() if by_heads > 1}
    found |= {name: max(value * by_heads // by_width, 2) for name, value in each.items()}
    return found | {name: value // by_width for name, value in widths.items() if by_width > 1}


def _power(values: list[int], fits: Callable[[int], bool]) -> int:
    """Return the largest power of two that divides all values and that `fits` accepts."""
    factors = [1 << bits for bits in range(20) if all(value % (1 << bits) == 0 for value in values)]
    return max((factor for factor in factors if values and fits(factor)), default=1)
