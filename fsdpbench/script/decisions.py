"""Decisions of a script that depend on placeholders: the line, the question, the answer, and how often.

A simulated tensor has no value. Every question of a script about it, `if loss < best`, `range(int(count))`,
gets an answer all the same, and the run follows that answer. So every such answer is recorded with
its line.

    loss.item(), loss.cpu().item() ──> a number that remembers its origin (`numbers.py`)
        number < best, bool(number), int(number), math.isnan(number) ──> recorded
    if loss < best, int(count), x[:count], torch.equal(a, b)         ──> recorded immediately
    float(loss), loss.cpu().numpy()   cannot be followed further: recorded, unless only printed
    loss.item(), loss.cpu()           noted as read, unless only printed: decisions by a file or an array
                                      made from the value go back to such a line
"""

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import rnn

from fsdpbench.base.result_sections import NumbersRead, PlaceholderDecision
from fsdpbench.base.torch_internals import DisableTorchFunctionSubclass, find
from fsdpbench.script.interposing import around
from fsdpbench.script.numbers import Followed, all_plain, follow_math, followed, holds, plain
from fsdpbench.script.own_files import OwnFiles, is_of_torch, is_only_printed, is_only_shown, passing
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.operators.known_values import (
    assume,
    holds_placeholders,
    known_of,
    learn,
    mark_as_placeholders,
)
from fsdpbench.sim.torch_device.patches.dynamo import stand_in_for_builtin
from fsdpbench.sim.torch_device.tensors import Assumed, is_on_device, tensors_in

_MOST_IN_WORDS = 3
_WRITERS = ("json", "csv", "logging", "pprint", "yaml")
"""Modules that compare numbers only to write them."""
_PASSING = ("__call__", "_fn", "inner")
_MOST_FOLLOWED = 1 << 20
_INFINITE = (math.inf, -math.inf)


class Decisions:
    """The record of one run. Created once, before the script starts."""

    def __init__(self, own_files: OwnFiles) -> None:
        self._own_files = own_files
        self._counts: dict[tuple[str, int, str, Any], int] = {}
        self._reads: dict[tuple[str, int, str], int] = {}
        self._asked = False
        """Whether a Python method of a tensor is asking, which records its own name."""
        self._guessed = False
        """Whether the last answer came from a placeholder."""

    def follow(self, simulation: Simulation) -> None:
        """Record the questions to the simulated device's tensors from now on."""
        simulation.accelerator.follows_numbers = True
        simulation.accelerator.on_value = self._answered
        simulation.accelerator.host_kind = HostPlaceholder
        Followed.decided = self.record
        follow_math()
        _Tensors(self).install()

    def record(self, operation: str, answer: Any) -> None:
        """Record that the script's innermost line asked `operation` and got `answer`.

        Questions of torch's own code are not recorded: it checks what is true of healthy training.
        """
        frame = self._own_files.innermost()
        if frame is None or _is_written_down() or is_of_torch(_asking()):
            return
        if operation in ("float", "numpy") and is_only_shown(frame):
            return
        file = self._own_files.whole_name(frame.f_code.co_filename)
        answer = plain(answer.item() if hasattr(answer, "item") else answer)  # numpy has its own types
        if not isinstance(answer, bool | int | float | str) or answer in _INFINITE:
            answer = str(answer)
        key = (file, frame.f_lineno, operation, answer)
        self._counts[key] = self._counts.get(key, 0) + 1

    def note_read(self, operation: str) -> None:
        """Record that the script's innermost line has copied a placeholder to the host."""
        frame = self._own_files.innermost()
        if frame is None or _is_written_down() or is_only_printed(frame):
            return
        key = (self._own_files.whole_name(frame.f_code.co_filename), frame.f_lineno, operation)
        self._reads[key] = self._reads.get(key, 0) + 1

    def reads(self) -> list[NumbersRead]:
        """Return the lines that copied placeholders to the host."""
        return [NumbersRead(*read, count) for read, count in self._reads.items()]

    def reported(self) -> list[PlaceholderDecision]:
        """Return the decisions in order of their first occurrence."""
        return [PlaceholderDecision(*decision, count) for decision, count in self._counts.items()]

    def in_words(self, line: tuple[str, int] | None = None) -> list[str]:
        """Return the most frequent decisions as text; only those of `line`, of a file, if it is given."""
        if line is not None:
            line = (self._own_files.whole_name(line[0]), line[1])
        chosen = [each for each in self._counts.items() if line is None or each[0][:2] == line]
        most = sorted(chosen, key=lambda item: -item[1])[:_MOST_IN_WORDS]
        places = [
            f"{os.path.basename(file)}:{number} ({operation}: {answer}, {count} time{'s' * (count > 1)})"
            for (file, number, operation, answer), count in most
        ]
        return [f"it decided by values that are not there at {', '.join(places)}"] if places else []

    def _answered(self, operation: str, answer: Any, is_true: bool) -> None:
        """Record an answer of the device, unless it is a real value or a Python method records it."""
        if self._asked and operation == "item":
            self._guessed = not is_true
        elif not is_true:
            self.record(operation, answer)

    def ask(self, tensor: torch.Tensor, question: Callable[[torch.Tensor], Any]) -> tuple[Any, bool]:
        """Return the answer to a Python method of a tensor, and whether it comes from a placeholder."""
        before, self._asked, self._guessed = self._asked, True, False
        try:
            with DisableTorchFunctionSubclass():
                answer = question(tensor)
        finally:
            self._asked = before
        return answer, self._guessed or isinstance(tensor, HostPlaceholder) or _came_from_device(tensor)

    def reading(self) -> bool:
        """Return whether a file of the script (or torch's RNN code) calls the method that calls this."""
        frame = _asking()  # beyond other wrappers of the same method
        name = "" if frame is None else frame.f_code.co_filename
        return name == rnn.__file__ or self._own_files.has(name)


class _Tensors:
    """The methods of `torch.Tensor` through which Python learns values."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions

    def install(self) -> None:
        """Replace torch's methods with the methods below."""
        kind = torch.Tensor
        for name in ("bool", "int", "index", "float"):
            around(kind, f"__{name}__", functools.partial(self._deciding, name))
        around(kind, "item", self._numbered)
        around(kind, "tolist", self._listed)
        for name in ("cpu", "to"):
            around(kind, name, self._copied)
        for name in ("numpy", "__array__"):
            around(kind, name, self._as_array)
        around(kind, "copy_", self._written)
        around(kind, "__setitem__", self._assigned)
        close = ((torch, "isclose", self._close), (kind, "isclose", self._close))
        made = ((torch, name, self._made) for name in ("tensor", "as_tensor", "full", "full_like"))
        new = ((kind, name, self._made) for name in ("new_tensor", "new_full"))
        for owner, name, call in (*close, *made, *new):
            original = getattr(owner, name)
            around(owner, name, call)
            stand_in_for_builtin(original, getattr(owner, name))

    def _deciding(self, operation: str, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
        decisions = self._decisions
        answer, guessed = decisions.ask(tensor, original)
        if guessed:
            answer = _passing(answer)
            decisions.record(operation, answer)
        return answer

    def _numbered(self, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """Call `item`: floats are followed; a bool or an integer, maybe a length, is recorded immediately."""
        decisions = self._decisions
        answer, guessed = decisions.ask(tensor, original)
        if not guessed:
            return answer
        answer = _passing(answer)
        decisions.note_read("item")
        is_compiled = sys._getframe(2).f_code in find("dynamo_output_codes")
        if is_compiled or not isinstance(answer, float):
            decisions.record("item", answer)
        # Dynamo would trace into a followed number, and break the graph there.
        return answer if is_compiled else followed(answer)

    def _listed(self, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
        decisions = self._decisions
        host = tensor.cpu() if is_on_device(tensor) else tensor
        answer, guessed = decisions.ask(host, original)
        if guessed:
            decisions.note_read("tolist")
        is_compiled = sys._getframe(2).f_code in find("dynamo_output_codes")
        if guessed and (is_compiled or not tensor.dtype.is_floating_point):
            decisions.record("tolist", _first(answer))
        return followed(answer) if guessed and not is_compiled else answer

    def _copied(
        self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Call `cpu` and `to`: a tensor that the script itself copies to the host is followed there."""
        decisions = self._decisions
        found: torch.Tensor = original(tensor, *args, **kwargs)
        if found is tensor or not _is_small_placeholder(found) or not decisions.reading():
            return found
        decisions.note_read(original.__name__)
        found.__class__ = HostPlaceholder  # no view, as `as_subclass` makes
        return found

    def _written(
        self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Call `copy_`: a host tensor into which the script itself copies placeholders is followed."""
        decisions = self._decisions
        original(tensor, *args, **kwargs)
        if _is_small_placeholder(tensor) and decisions.reading():
            decisions.note_read("copy_")
            tensor.__class__ = HostPlaceholder
        return tensor

    def _assigned(self, original: Callable[..., Any], tensor: torch.Tensor, index: Any, value: Any) -> None:
        """Run `losses[i] = loss.item()`: a host tensor that receives a placeholder is followed."""
        decisions = self._decisions
        original(tensor, index, plain(value))
        if isinstance(value, Followed) and is_on_device(tensor):
            assume(tensor)
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
            came = isinstance(value, Followed | HostPlaceholder) or holds_placeholders(tensor)
            if came and tensor.numel() <= _MOST_FOLLOWED and decisions.reading():
                mark_as_placeholders(tensor).__class__ = HostPlaceholder

    def _close(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call `isclose` (also for `torch.testing.assert_close`), which answers like `allclose`."""
        found: torch.Tensor = original(*args, **kwargs)
        if is_on_device(found) and known_of(found) is None:
            learn(found, True, assumed=Assumed.GUESS)
        return found

    def _as_array(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call `numpy`: arrays are not followed."""
        decisions = self._decisions
        if (isinstance(tensor, HostPlaceholder) or _came_from_device(tensor)) and decisions.reading():
            decisions.record("numpy", 0)
        with DisableTorchFunctionSubclass():  # else it is asked twice
            return original(tensor, *args, **kwargs)

    def _made(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call `torch.tensor` or `full`: a tensor made of placeholders holds placeholders."""
        made: torch.Tensor = original(*args, **kwargs)
        if holds([*args, *kwargs.values()]):
            if is_on_device(made):
                assume(made)
            else:
                mark_as_placeholders(made).__class__ = HostPlaceholder
        return made


class HostPlaceholder(torch.Tensor):
    """A host tensor that a script copied from the device, or computed from such a tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        _follow_results(found, tensors_in(args, kwargs or {}))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:  # torch formats the number of its own type alone
        return format(self.item() if not self.dim() else self.as_subclass(torch.Tensor), spec)

    def __str__(self) -> str:
        return str(self.as_subclass(torch.Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.as_subclass(torch.Tensor).__deepcopy__(memo)
        copied.__class__ = HostPlaceholder
        return copied


def _with_numbers(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call an operator of torch with followed numbers as plain ones; its results are followed.

    Results are not followed if the numbers are sizes: of a factory, or of a view.
    """
    named = {name: all_plain(value) for name, value in (kwargs or {}).items()}
    found, given = func(*map(all_plain, args), **named), tensors_in(args, named)
    first = found[0] if isinstance(found, (tuple, list)) and found else found
    if given and isinstance(first, torch.Tensor) and (first is given[0] or not first._is_view()):
        _follow_results(found, given)
    return found


Followed.__torch_function__ = classmethod(_with_numbers)  # type: ignore[attr-defined]


def _follow_results(found: Any, given: Sequence[torch.Tensor]) -> None:
    """Follow the results of an operator on placeholders, and the `given` tensors that it wrote."""
    for each in found if isinstance(found, (tuple, list)) else (found,):
        if isinstance(each, torch.Tensor) and is_on_device(each):
            assume(each)
        elif type(each) is torch.Tensor:
            each.__class__ = HostPlaceholder
            if any(each is tensor for tensor in given):
                mark_as_placeholders(each)


def _is_small_placeholder(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.numel() <= _MOST_FOLLOWED and _came_from_device(tensor)


def _came_from_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and holds_placeholders(tensor)


def _is_written_down() -> bool:
    """Return whether one of Python's writers asks, rather than the script."""
    frame = _asking()
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _WRITERS


def _asking() -> FrameType | None:
    """Return the frame that asks for a value, skipping the bench's, and torch's that pass an operator on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        (module := str(frame.f_globals.get("__name__"))).startswith("fsdpbench.")
        or (module.startswith("torch.") and frame.f_code.co_name in _PASSING)
    ):
        frame = frame.f_back
    return frame


def _passing(answer: Any) -> Any:
    """Return a guessed answer, or the answer that passes a check in the asking program."""
    frame = _asking() if isinstance(answer, bool) else None
    found = None if frame is None else passing(frame.f_code, frame.f_lasti)
    return answer if found is None else found


def _first(answer: Any) -> Any:
    """Return the first number of nested lists; all of them are equal."""
    while isinstance(answer, list) and answer:
        answer = answer[0]
    return 0 if isinstance(answer, list) else plain(answer)


__all__ = ["Decisions"]
