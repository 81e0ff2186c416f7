"""Each hook and each wait of the runtime taken out, and hooks in other orders; what a program then computes.

A mutant replaces one method while a program runs. ``wait()`` of the backend's own work is not among them: it
is what a wait comes down to, and ``test_what_is_not_waited_for_is_seen`` shows that its loss is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from fsdpbench.impl.runtime import tree
from fsdpbench.impl.runtime.gather import Gather
from fsdpbench.impl.runtime.hooks import ModuleHooks, hooks_of
from fsdpbench.impl.runtime.schedule import Schedule
from fsdpbench.impl.runtime.stage import Stage
from fsdpbench.impl.runtime.tree import Runtime
from fsdpbench.impl.runtime.unit import Unit, UnitState
from fsdpbench.impl.shared.torch_internals import current_graph_task_id

Mutant = Callable[[], AbstractContextManager[Any]]


def name_of(thing: Any) -> str:
    """The unit's name of a unit, a stage or its hooks."""
    thing = getattr(thing, "stage", thing)
    units = getattr(thing, "units", (thing,))
    return units[0].name if units else ""


def without(owner: type, method: str, which: str = "", instead: Any = None) -> Mutant:
    """``method`` does nothing, for all or for unit ``which``, and returns ``instead`` of its arguments."""

    def mutate() -> AbstractContextManager[Any]:
        original = getattr(owner, method)

        def dropped(self: Any, *arguments: Any, **named: Any) -> Any:
            about = next(
                (each for each in (self, *arguments) if isinstance(each, ModuleHooks | Stage | Unit)), None
            )
            if which and (about is None or name_of(about) != which):
                return original(self, *arguments, **named)
            return instead(*arguments) if instead else None

        return patch.object(owner, method, dropped)

    return mutate


def _inputs(module: Any, args: Any, kwargs: Any) -> Any:
    return args, kwargs


def _output(module: Any, args: Any, output: Any) -> Any:
    return output


def _same_output(output: Any) -> Any:
    return output


def _same_inputs(args: Any, kwargs: Any) -> Any:
    return args, kwargs


def static(method: str, which: str = "") -> Mutant:
    """The same for a static method of the schedule, whose first argument is the stage."""

    def mutate() -> AbstractContextManager[Any]:
        original = getattr(Schedule, method)

        def dropped(stage: Stage, hold: int = 0) -> None:
            if which and name_of(stage) != which:
                original(stage, hold)

        return patch.object(Schedule, method, staticmethod(dropped))

    return mutate


@contextmanager
def _waits_only_in(forward: bool) -> Iterator[None]:
    original = Schedule.await_stage

    def dropped(stage: Stage, hold: int = 0) -> None:
        if (current_graph_task_id() != -1) is not forward:
            original(stage, hold)

    with patch.object(Schedule, "await_stage", staticmethod(dropped)):
        yield


@contextmanager
def _without_finish(which: str) -> Iterator[None]:
    """No gather of unit ``which``, or of any, is waited for; its unit is the one that asks for it."""
    original, asking = Gather.finish, list[str]()

    def around(method: str) -> Any:
        inner = getattr(Unit, method)

        def call(self: Unit, hold: int = 0) -> None:
            asking.append(self.name)
            inner(self, hold)
            asking.pop()

        return patch.object(Unit, method, call)

    def dropped(self: Gather, context: Any) -> None:
        if which and asking[-1:] != [which]:
            original(self, context)

    with around("wait_all_gather"), around("reshard"), patch.object(Gather, "finish", dropped):
        yield


@contextmanager
def _late_backward_hooks() -> Iterator[None]:
    """A stage's pre-backward runs, but right after its post-backward."""
    before, after = ModuleHooks.pre_backward, ModuleHooks.post_backward

    def post(self: ModuleHooks) -> None:
        after(self)
        before(self, None)  # type: ignore[arg-type]

    with patch.object(ModuleHooks, "pre_backward", lambda self, gradient: None):
        with patch.object(ModuleHooks, "post_backward", post):
            yield


@contextmanager
def _before(method: str, first: Callable[[ModuleHooks], None]) -> Iterator[None]:
    original = getattr(ModuleHooks, method)

    def call(self: ModuleHooks, *arguments: Any) -> Any:
        first(self)
        return original(self, *arguments)

    with patch.object(ModuleHooks, method, call):
        yield


@contextmanager
def _after(method: str, then: Callable[[ModuleHooks], None]) -> Iterator[None]:
    original = getattr(ModuleHooks, method)

    def call(self: ModuleHooks, *arguments: Any) -> Any:
        result = original(self, *arguments)
        then(self)
        return result

    with patch.object(ModuleHooks, method, call):
        yield


def _reshard(hooks: ModuleHooks) -> None:
    for unit in hooks.stage.units:
        unit.reshard()


def _gather(hooks: ModuleHooks) -> None:
    """An all-gather that nothing waits for, where the unit is sharded."""
    for unit in hooks.stage.units:
        unit.all_gather()


def _post_backward_of_others(hooks: ModuleHooks) -> None:
    for other in hooks.runtime.stages:
        if other is not hooks.stage:
            _POST_BACKWARD(hooks_of(other.modules[0]))  # type: ignore[arg-type]


def _others_enter(hooks: ModuleHooks) -> None:
    for other in hooks.runtime.stages:
        if other is not hooks.stage and other.units and other.units[0].state is UnitState.SHARDED:
            hooks.runtime.schedule.enter_backward(other)


_PRE_BACKWARD, _POST_BACKWARD = ModuleHooks.pre_backward, ModuleHooks.post_backward
STAGES = ("", "root", "blocks.0", "blocks.1", "blocks.2")

MUTANTS: dict[str, Mutant] = {}
for _which in STAGES:
    _of = f" of {_which or 'all'}"
    MUTANTS |= {
        f"no pre-forward{_of}": without(ModuleHooks, "pre_forward", _which, _inputs),
        f"no post-forward{_of}": without(ModuleHooks, "post_forward", _which, _output),
        f"no pre-backward{_of}": without(ModuleHooks, "pre_backward", _which),
        f"no post-backward{_of}": without(ModuleHooks, "post_backward", _which),
        f"no boundary{_of}": without(ModuleHooks, "_put_boundary", _which, _same_inputs),
        f"no hooks on outputs{_of}": without(ModuleHooks, "_hook_outputs", _which, _same_output),
        f"no gather in forward{_of}": without(Schedule, "enter_forward", _which),
        f"no gather in backward{_of}": without(Schedule, "enter_backward", _which),
        f"no wait{_of}": static("await_stage", _which),
        f"no gather{_of}": without(Schedule, "gather", _which),
        f"no finish of the gather{_of}": partial(_without_finish, _which),
        f"no wait of the unit{_of}": without(Unit, "wait_all_gather", _which),
        f"no reshard in forward{_of}": without(Unit, "reshard_in_forward", _which),
        f"no check before post-backward{_of}": without(Stage, "check_entered", _which),
        f"no order{_of}": without(Schedule, "leave_forward", _which),
    }
MUTANTS |= {
    "no wait in forward": lambda: _waits_only_in(False),
    "no wait in backward": lambda: _waits_only_in(True),
    "no prefetch in backward": without(Schedule, "_prefetch_backward"),
    "no begin of forward": without(Runtime, "begin_forward"),
    "no end of forward": without(Runtime, "end_forward"),
    "no begin of backward": without(Runtime, "begin_backward"),
    "no end of backward": without(Runtime, "_end_backward"),
    "no call back": lambda: patch.object(tree, "queue_callback", lambda callback: None),
    "no rest at the end of backward": without(Runtime, "_finish_backward"),
    "no drop of what changed": without(Runtime, "_drop_what_changed"),
    "no drop of what was skipped": without(Runtime, "_drop_what_was_skipped"),
    "no drop without gradients": without(Stage, "drop_without_grad"),
    "no finish of reductions": lambda: patch("fsdpbench.impl.runtime.reduction.Reducer.finish"),
    "pre-backward after post-backward": _late_backward_hooks,
    "pre-backward twice": lambda: _after("pre_backward", partial(_PRE_BACKWARD, gradient=None)),
    "post-backward twice": lambda: _after("post_backward", _POST_BACKWARD),
    "post-backward before pre-backward": lambda: _before("pre_backward", _POST_BACKWARD),
    "post-backward of all first": lambda: _before("post_backward", _post_backward_of_others),
    "pre-backward of all first": lambda: _before("pre_backward", _others_enter),
    "resharded before backward": lambda: _after("pre_backward", _reshard),
    "resharded in forward": lambda: _after("pre_forward", _reshard),
    "gathered again in backward": lambda: _after("pre_backward", lambda s: (_reshard(s), _gather(s))[0]),
    "gathered after forward": lambda: _after("post_forward", _gather),
    "gathered after backward": lambda: _after("post_backward", _gather),
}
QUICK_MUTANTS = (
    "no pre-forward of blocks.1", "no hooks on outputs of blocks.1", "no wait in backward",
    "gathered again in backward",
)  # fmt: skip
