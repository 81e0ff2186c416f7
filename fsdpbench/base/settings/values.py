"""Parsers of the values of settings. Each raises `ValueError` for invalid text."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdpbench.base.numbers import LARGEST_INTEGER, finite_number, whole_number

Value = int | float | str | bool | None
MOST_OF_A_SIZE = 2**31 - 1
"""The maximum of samples, tokens, units and ranks (sizes of tensors and lists); seeds may exceed it."""
MOST_OF_A_LIST = 4096
"""The most blocks or units in a value that lists them (`full:20+none:12`)."""


def whole(minimum: int, most: int = MOST_OF_A_SIZE) -> Callable[[str], Value]:
    """Return a parser of whole numbers within these bounds."""

    def parse(text: str) -> Value:
        return whole_number(text, minimum, most)

    return parse


def positive(text: str) -> Value:
    """Parse a finite number above 0."""
    number = finite_number(text)
    if number <= 0:
        raise ValueError("a number above 0")
    return number


@dataclass(frozen=True)
class Choice:
    """A parser of a few words, in any case: `words` are shown to users, `values` maps lower-case words."""

    words: tuple[str, ...]
    values: Mapping[str, Value]

    def __call__(self, text: str) -> Value:
        if text.lower() not in self.values:
            raise ValueError("")
        return self.values[text.lower()]


def one_of(*choices: str) -> Choice:
    """Return a parser that accepts only these words."""
    return Choice(choices, {choice.lower(): choice for choice in choices})


TRUE_WORDS = ("true", "on", "yes", "1")
flag = Choice(
    ("true", "false"),
    {**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(("false", "off", "no", "0"), False)},
)


def words_or(first: Mapping[str, Value], otherwise: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a parser of a few words with fixed values, which passes other text to `otherwise`."""

    def parse(text: str) -> Value:
        if text.lower() in first:
            return first[text.lower()]
        return otherwise(text)

    return parse


def none_or(word: str, otherwise: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a parser that reads `word` and `none` as None, and passes other text to `otherwise`."""
    return words_or({word: None, "none": None}, otherwise)


def for_each(one: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a parser of one value for all blocks or units, or of `A:20+B:12`: A for the first 20, then B."""

    def parse(text: str) -> Value:
        if ":" not in text:
            return one(text)
        each: list[Value] = []
        for part in text.split("+"):
            value, _, count = part.rpartition(":")
            each += [one(value)] * whole_number(count, 1, MOST_OF_A_LIST - len(each))
        if len(set(each)) < 2:
            raise ValueError("VALUE:N+VALUE:N needs two different values; one for all has no number")
        return joined(each)

    return parse


def joined(each: Sequence[Value]) -> str:
    """Write one value for each block or unit in the form of `for_each`: `full:20+none:12`."""
    words = [str(value).lower() for value in each]
    return "+".join(f"{word}:{len(list(same))}" for word, same in itertools.groupby(words))


def is_mixed(value: object) -> bool:
    """Return whether a setting's value differs between blocks or units."""
    return isinstance(value, str) and ":" in value


def spread(mixed: str) -> list[str]:
    """Return the value of each block or unit in a mixed value, in forward order."""
    parts = (part.rpartition(":") for part in mixed.split("+"))
    return [value for value, _, count in parts for _ in range(int(count))]


def every_k(text: str) -> Value:
    """Parse `every-K`, and drop leading zeros."""
    prefix, _, count = text.partition("-")
    if prefix != "every":
        raise ValueError("")
    return f"every-{whole_number(count, 1, MOST_OF_A_SIZE)}"


def unit_sizes(wrap: str, lists: Sequence[int]) -> list[int]:
    """Return the number of blocks of each unit; `lists` are the lengths of the model's lists of blocks. Empty
    if `wrap` does not determine them, or if they do not fit the lists."""
    if wrap == "block" or not wrap.startswith("every-"):
        return [1] * sum(lists) if wrap == "block" else []
    if not is_mixed(wrap):
        each = int(wrap.removeprefix("every-"))
        return [min(each, count - start) for count in lists for start in range(0, count, each)]
    sizes = [int(unit.removeprefix("every-")) for unit in spread(wrap)]
    ends = [*itertools.accumulate(sizes)]
    return sizes if ends[-1] == sum(lists) and {*itertools.accumulate(lists)} <= {*ends} else []


def checkpointing(text: str) -> Value:
    """Parse `none`, `full`, `op`, `every-K`, `op-every-K`, or a value per block: `full:20+none:12`."""
    return every_k(text) if text.startswith("every-") else for_each(_recomputed)(text)


def _recomputed(text: str) -> Value:
    if text in ("none", "full", "op"):
        return text
    if not text.startswith("op-"):
        raise ValueError("")
    return f"op-{every_k(text[3:])}"


def wrap(text: str) -> Value:
    """Parse what to wrap as units: a word, `every-K`, `every-K:N+...`, `size:N`, or names joined by `+`."""
    if text in ("block", "root"):
        return text
    if text.startswith("every-"):
        return for_each(every_k)(text)
    if text.startswith("size:"):
        return f"size:{parameters(text[5:])}"
    if not all(part.isidentifier() or part.isdecimal() for part in text.replace("+", ".").split(".")):
        raise ValueError("")
    return text


def joined_names(text: str) -> Value:
    """Parse names joined by `+`."""
    if not all(part.isidentifier() for part in text.split("+")):
        raise ValueError("")
    return text


def parameters(text: str) -> int:
    """Parse a number of parameters such as `1e8` or `100000000`."""
    number = finite_number(text)
    if not 1 <= number <= LARGEST_INTEGER:
        raise ValueError("a number of parameters from 1 to 2^63-1")
    return int(number)


dtype = Choice(
    ("bf16", "fp16", "fp32"),
    {
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
        **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    },
)
