"""The guards of a trace: kept as what they are of, and built again of the values that are there.

Two lists of guards are the same where torch writes them in the same words, with what an object means
(`meaning.py`) in the place of its number. Then what is guarded now is what was guarded then, and torch would
make the same of the frame.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fsdpbench.sim.compile.traces.meaning import Meanings, NotKeptError
from fsdpbench.torch_internals import dynamo_convert_frame, dynamo_guards, dynamo_output_graph, torch_guards

_KINDS = frozenset(
    (
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "BUILTIN_MATCH",
        "CLASS_MATCH",
        "CLOSURE_MATCH",
        "CONSTANT_MATCH",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "DICT_CONTAINS",
        "DICT_KEYS_MATCH",
        "DICT_NOT_CONTAINS",
        "DUPLICATE_INPUT",
        "EMPTY_NN_MODULE_HOOKS_DICT",
        "EQUALS_MATCH",
        "FSDP_TRAINING_STATE",
        "FUNCTION_MATCH",
        "GLOBAL_STATE",
        "GRAD_MODE",
        "HASATTR",
        "ID_MATCH",
        "MODULE_MATCH",
        "NONE_MATCH",
        "NOT_PRESENT_IN_GENERIC_DICT",
        "SEQUENCE_LENGTH",
        "SHAPE_ENV",
        "TENSOR_MATCH",
        "TORCH_FUNCTION_STATE",
        "TYPE_MATCH",
    )
)
"""Those whose words say all that they check."""
_NUMBER = re.compile(r"\b\d+\b")
_LEAST_OF_UNKNOWN = 10**11
"""A number that may be of an object, though none is known by it. Objects have smaller ones too, where Python
is not position-independent code."""
_TENSOR = re.compile(r"check_tensor\(.*, (\w+), DispatchKeySet\(")
_ARE_HOOKS = re.compile(r"_(forward|backward)(_pre)?_hooks$")
_PLAIN_TENSORS = ("Tensor", "Parameter")


@dataclass(frozen=True)
class Guards:
    """``checks``: source, kind, and the kind's own arguments. The rest as Dynamo's state has it."""

    checks: tuple[tuple[Any, str, tuple[Any, ...], dict[str, Any]], ...]
    on_key_order: frozenset[Any]
    sizes_strides: dict[Any, Any]
    builtins_name: str | None

    @classmethod
    def of(cls, graph: Any) -> Guards:
        """Of a trace that has just ended. Raises NotKeptError."""
        state = graph.dump_guards_state()
        if (
            state.torch_function_mode_stack
            or state.current_device is not None
            or state.functorch_layers
            or state.dual_level >= 0
            or state._aotautograd_guards
            or state.export
            or state.skip_guards_check
            or graph.shape_env.guards
            or any(map(_varies, graph.shape_env.tracked_fakes or ()))
        ):
            raise NotKeptError("it depends on modes, or on sizes that vary")
        return cls(
            tuple((guard.originating_source, *_kind_of(guard.create_fn)) for guard in sorted(state.guards)),
            frozenset(state.guard_on_key_order),
            dict(state.input_source_to_sizes_strides),
            state.name_of_builtins_dict_key_in_fglobals,
        )

    def state(self, f_locals: dict[str, Any], f_globals: dict[str, Any]) -> Any:
        """As Dynamo would have it of a frame with these values."""
        made = dynamo_output_graph.OutputGraphGuardsState(
            local_scope=f_locals,
            global_scope=f_globals,
            torch_function_mode_stack=[],
            guard_on_key_order=set(self.on_key_order),
            input_source_to_sizes_strides=self.sizes_strides,
            dual_level=-1,
            functorch_layers=[],
            current_device=None,  # one that is set is a mode
            global_state_guard=dynamo_convert_frame.GlobalStateGuard(),
            _guards=torch_guards.GuardsSet(),
            _aotautograd_guards=[],
            name_of_builtins_dict_key_in_fglobals=self.builtins_name,
        )
        for check in self.checks:
            made.guards.add(_made(*check), collect_debug_stack=False)
        return dynamo_output_graph.OutputGraphCommon(made)


class _Watching(dynamo_guards.CheckFunctionManager):
    """Builds guards, and notes whose numbers are in them. `state`: what they are built of."""

    def __init__(self, code: Any, state: Any) -> None:
        self.numbered: dict[int, Any] = {}
        self.state = state
        super().__init__(code, state)

    def id_ref(self, obj: Any, obj_str: str) -> int:
        self.numbered[id(obj)] = obj
        number: int = super().id_ref(obj, obj_str)
        return number


def built(guards: Guards, code: Any, f_locals: dict[str, Any], f_globals: dict[str, Any]) -> Any:
    """The guards, checked once by torch. Raises whatever torch does where a value is not there."""
    if dynamo_convert_frame.torch_function_mode_stack_state_mgr.stack:
        raise NotKeptError("a mode follows functions")  # which Dynamo has put aside while it traces
    return _Watching(code, guards.state(f_locals, f_globals))


def words_of(manager: Any, meanings: Meanings) -> str:
    """What guards say, the same in each process. Raises NotKeptError."""

    def meant(match: re.Match[str]) -> str:
        number = int(match.group())
        if number in manager.numbered:
            return meanings.of(manager.numbered[number])
        if number >= _LEAST_OF_UNKNOWN:
            raise NotKeptError("a guard has a number of something unknown")
        return match.group()

    text = str(manager.guard_manager)
    if " at 0x" in text or any(kind not in _PLAIN_TENSORS for kind in _TENSOR.findall(text)):
        raise NotKeptError("a guard is of an object without a name, or of another kind of tensor")
    return _NUMBER.sub(meant, text)


def check_hooks(values: Iterable[Any], code: Any) -> None:
    """Raises NotKeptError: a call inside of the frame runs hooks, which Dynamo's guards leave out. Those of a
    module whose `forward` is the frame run outside of it."""
    called = [
        module
        for value in values
        if isinstance(value, torch.nn.Module)
        for module in value.modules()
        if module is not value or getattr(value.forward, "__code__", None) is not code
    ]
    for owner in (torch.nn.modules.module, *called):
        if any(_ARE_HOOKS.search(name) and found for name, found in vars(owner).items()):
            raise NotKeptError("modules inside have hooks")


def _varies(tracked: Any) -> bool:
    """Whether an input of the graph has a symbol for a size, or is one."""
    fake = tracked.fake
    sizes = (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else (fake,)
    return not all(isinstance(size, int) for size in sizes)


def _kind_of(create: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    args, options = (), {}
    if isinstance(create, functools.partial):
        create, args, options = create.func, create.args, dict(create.keywords)
    name = create.__name__
    if name not in _KINDS or getattr(dynamo_guards.GuardBuilder, name, None) is not create:
        raise NotKeptError(f"a guard of the kind {name}")
    if name == "TENSOR_MATCH":
        options.pop("value", None)  # the tensor itself, which the source finds
    return name, args, options


def _made(source: Any, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    create = getattr(dynamo_guards.GuardBuilder, kind)
    if args or options:
        create = functools.partial(create, *args, **options)
    made = torch_guards.Guard(source, create)
    made.user_stack = traceback.StackSummary()  # else each looks its place up in the sources
    return made
