"""Choices of a router, assumed balanced, so that masks derived from them have a known number of elements.

    topk(scores, k).indices                chosen among N experts
    one_hot(chosen), chosen == expert      a mask with the share k/N, or 1/N, of true elements
    mask.sum(), mask.any()                 numbers, once they cover enough of the mask
    torch.where(mask), x[mask]             rows by that share; the script's line is reported
    mask.sum((1, 2)).nonzero()             all experts, by number
    tokens = multinomial(...); tokens == 2 no element: texts over a vocabulary reach their maximum length

The rows of one expert are rounded to the nearest number, at least 1. A mask of other origin (scores, tokens)
has no share, and operators whose result's length depends on it are refused.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from fsdpbench.sim.torch_device import tensors
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

_OF_ALL = {"clone", "_to_copy", "cat", "stack", "copy_", "expand_copy", "view_copy", "contiguous"}
"""Operators whose result has a choice if all of their tensors share it."""
_OF_FIRST = {"index", "index_select", "gather", "repeat", "sort", "flip", "roll", "repeat_interleave"}
"""Operators whose result has the choice of their first tensor."""
_OF_TEXTS = {"cat", "stack", "where", "index_put_", "masked_fill", "masked_fill_"}
"""Operators whose result is sampled text if one of their tensors is; others are prompts or padding."""
_VOCABULARY = 1000
"""From this number of choices on, they are tokens of a vocabulary, not experts of a router."""
_NEGATIONS = {"logical_not", "bitwise_not"}
_SCATTERS = {"scatter", "scatter_"}
MOST_LISTED = 1 << 22
"""Bytes of the largest tensor whose whole numbers are stored."""
_LARGEST = {"any", "max", "amax"}
_SUMS = {"sum", "count_nonzero"}


class Found(NamedTuple):
    """The choice of a result, and the number that all of its elements equal, each if known."""

    choice: tensors.Choice | None = None
    number: int | None = None


def choice_of(tensor: torch.Tensor) -> tensors.Choice | None:
    """Return the known choice of a device tensor."""
    record = tensors.record_of(tensor.untyped_storage()) if tensors.is_on_device(tensor) else None
    return None if record is None else record.choice


def mark(tensor: torch.Tensor, choice: tensors.Choice | None) -> None:
    """Attach a choice to the storage of `tensor`; None removes it."""
    record = tensors.record_of(tensor.untyped_storage())
    if record is not None and (choice is not None or record.choice is not None):
        is_number = choice is not None and not isinstance(choice, tensors.Listed)
        tensors.remember(record, record.known if is_number else None, choice)


def rows_of(mask: torch.Tensor) -> int | None:
    """Return the number of true elements of a mask, or None if it depends on data."""
    share = choice_of(mask)
    if not isinstance(share, tensors.Share):
        numbers = whole_numbers(mask)
        return None if numbers is None else int(torch.count_nonzero(placed(numbers, mask)))
    if not mask.numel():
        return None
    return max(1, round(share.of_all * mask.numel()))


def whole_numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return all numbers in a tensor's storage as a host row; None if unknown or not whole."""
    record = tensors.record_of(tensor.untyped_storage())
    if record is None or tensor.is_floating_point() or tensor.is_complex():
        return None
    if isinstance(record.choice, tensors.Listed):
        return record.choice.values.view(tensor.dtype)
    known = record.known if record.choice is None and record.nbytes <= MOST_LISTED else None
    if known is None or known.assumed is tensors.Assumed.ANSWER:
        return None
    return known.value.repeat(record.nbytes // known.value.element_size()).view(tensor.dtype)


def placed(numbers: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a storage's numbers in the geometry of a tensor on that storage."""
    geometry = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return numbers.view(tensor.dtype).as_strided(*geometry)


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers of a tensor with values from the host, or of a view of it; None for others."""
    listed = choice_of(tensor)
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return placed(listed.values, tensor) if isinstance(listed, tensors.Listed) and is_whole else None


def assumed_of(*taken: torch.Tensor) -> tensors.Assumed:
    """Return how certain the numbers in these tensors are."""
    records = [tensors.record_of(tensor.untyped_storage()) for tensor in taken]
    known = [
        each.choice if isinstance(each.choice, tensors.Listed) else each.known for each in records if each
    ]
    return max((each.assumed for each in known if each), default=tensors.Assumed.NO)


def followed_choice(
    name: str,
    args: Sequence[Any],
    taken: Sequence[torch.Tensor],
    choices: Sequence[tensors.Choice | None],
    results: Sequence[torch.Tensor],
) -> Found:
    """Return the result's choice for operator `name`, whose tensors `taken` have these choices."""
    if name in _SCATTERS:
        return Found(_one_hot(args))
    if name in _OF_TEXTS and (texts := [choice for choice in choices if _is_text(choice)]):
        return Found(texts[0])
    if any(isinstance(choice, tensors.Listed) for choice in choices):
        return Found()
    first = choices[0] if name != "copy_" else choices[-1]
    if name in _OF_ALL:
        same = name == "copy_" or all(choice == first for choice in choices)
        return Found(first if same else None)
    if name in _OF_FIRST:
        return Found(first)
    if isinstance(first, tensors.Chosen):
        if name in ("max", "amax") and results and results[0].numel() == 1:
            return Found(number=first.among - 1)
        if name in ("eq", "ne") and _is_text(first) and torch.as_tensor(args[1]).numel() == 1:
            ACCELERATOR.guess(f"torch.{name}", "none is: sampled texts reach their longest")
            return Found(number=int(name == "ne"))
        return Found(_compared_choice(name, args, first))
    if not isinstance(first, tensors.Share):
        return Found()
    if name in _NEGATIONS:
        return Found(tensors.Share(1 - first.of_all, True))
    if name in _LARGEST | _SUMS and results and results[0].numel():
        return _reduced(name, first, taken[0].numel() // results[0].numel())
    return Found(_compared_share(name, args, first))


def _is_text(choice: tensors.Choice | None) -> bool:
    return isinstance(choice, tensors.Chosen) and choice.among >= _VOCABULARY


def _one_hot(args: Sequence[Any]) -> tensors.Share | None:
    """Return the choice of `zeros.scatter(dim, chosen, 1)`, or the same with weights instead of 1."""
    target, dim, index, value = args[:4]
    chosen = choice_of(index)
    if not isinstance(chosen, tensors.Chosen) or not target.numel() or target.shape[dim] != chosen.among:
        return None
    is_one = not isinstance(value, torch.Tensor) and value == 1
    if not is_one and not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return None
    if is_one:
        ACCELERATOR.guess(
            "one_hot", f"balanced: all of {chosen.among} as often; what a capacity drops is not known"
        )
    return tensors.Share(min(Fraction(1), Fraction(index.numel(), target.numel())), is_one)


def _compared_choice(name: str, args: Sequence[Any], chosen: tensors.Chosen) -> tensors.Share | None:
    """Return the choice of `chosen == expert`: one number or element, or all in the last dimension."""
    if name not in ("eq", "ne") or choice_of(args[0]) != chosen:
        return None
    other = args[1]
    if isinstance(other, torch.Tensor) and other.numel() != 1:
        every = other.dim() == 1 and other.numel() == chosen.among and args[0].shape[-1] == 1
        if not every:
            return None
    share = Fraction(1, chosen.among)
    return tensors.Share(share if name == "eq" else 1 - share, True)


def _compared_share(name: str, args: Sequence[Any], share: tensors.Share) -> tensors.Share | None:
    """Return the choice of a mask compared with 0 or 1: that of the mask or of its complement."""
    if name not in ("eq", "ne", "gt", "ge") or isinstance(args[1], torch.Tensor):
        return None
    against = (name, args[1])
    if against == ("eq", 0):
        return tensors.Share(1 - share.of_all, True)
    same = against in (("ne", 0), ("gt", 0)) or (share.ones and against in (("eq", 1), ("ge", 1)))
    return tensors.Share(share.of_all, True) if same else None


def _reduced(name: str, share: tensors.Share, elements: int) -> Found:
    """Reduce a mask over `elements` each. If one of them should be true, the result is a number."""
    expected = share.of_all * elements
    if expected < 1:
        return Found(tensors.Share(expected, share.ones))
    if not share.ones and name not in ("any", "count_nonzero"):
        return Found(tensors.Share(Fraction(1), False))  # sums of weights
    number = 1 if name in _LARGEST else round(expected)
    return Found(tensors.Share(Fraction(1), number == 1), number)
