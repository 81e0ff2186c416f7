"""Situations of modules that ``FullyShardedDataParallel`` wraps: kinds, ignored parts, the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from flat_programs import CPU, Net, Side
from outcomes.flat_wrapping_rows import linear, trained, two, x
from outcomes.rows import Program, Table
from torch import nn

TABLE = Table()
row = TABLE.row
BOTH = {"modes": (False, True)}


# -- modules --


def _shapes(strategy: str, runs: bool) -> Program:
    """What modules show as their weights, to code that asks for sizes."""

    def program(side: Side) -> str:
        side.strategy = side.api.ShardingStrategy[strategy]
        side.build()
        if runs:
            side.loss(0).backward()
        weights = [side.net.enter.weight, side.net.enter.bias, side.net.layers[0].module.a.weight]
        return str([(tuple(weight.shape), weight.dtype, weight.device) for weight in weights])

    return program


_SHAPES = {
    f"{strategy}_{'after' if runs else 'before'}": _shapes(strategy, runs)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for runs in (False, True)
}
TABLE.family("shapes_of_weights_", _SHAPES, quick=True)


@row(**BOTH, quick=True)
def module_list(side: Side) -> None:
    side.wrap(nn.ModuleList([linear()]))


@row()
def module_dict(side: Side) -> None:
    side.wrap(nn.ModuleDict({"a": linear()}))


@row()
def module_list_by_policy(side: Side) -> None:
    side.wrap(Net(), auto_wrap_policy=side.policy_of({nn.ModuleList}))


@row()
def module_list_called(side: Side) -> None:
    trained(side, nn.ModuleList([linear()]))


@row()
def parameter_list(side: Side) -> None:
    side.wrap(nn.ParameterList([nn.Parameter(torch.ones(4))]))


@row()
def not_a_module(side: Side) -> None:
    side.wrap(3)


@row()
def no_parameters(side: Side) -> None:
    side.wrap(nn.ReLU())(x())


@row()
def wrapped_twice(side: Side) -> None:
    trained(side, side.wrap(linear()))


@row(**BOTH)
def scalar(side: Side) -> None:
    module = linear()
    module.scale = nn.Parameter(torch.tensor(1.0))
    side.wrap(module)


@row(**BOTH)
def integers(side: Side) -> None:
    module = linear()
    module.table = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
    side.wrap(module)


@row(**BOTH)
def several_dtypes(side: Side) -> None:
    side.wrap(nn.Sequential(linear(), linear().double()))


@row(**BOTH)
def frozen_and_trained(side: Side) -> None:
    side.wrap(nn.Sequential(linear(), linear().requires_grad_(False)))


@row(**BOTH)
def frozen_and_trained_by_policy(side: Side) -> None:
    net = Net()
    net.enter.requires_grad_(False)
    side.wrap(net, auto_wrap_policy=side.policy())


@row(**BOTH, quick=True)
def frozen_inside_by_policy(side: Side) -> None:
    net = Net()
    net.layers[0].a.requires_grad_(False)
    side.wrap(net, auto_wrap_policy=side.policy())


@row(**BOTH)
def frozen_units_by_policy(side: Side) -> None:
    net = Net()
    net.layers[0].requires_grad_(False)
    side.wrap(net, auto_wrap_policy=side.policy())


@row(**BOTH)
def frozen_inside_by_function(side: Side) -> None:
    net = Net()
    net.layers[0].a.requires_grad_(False)
    side.wrap(net, auto_wrap_policy=side.function_policy())


@row()
def frozen_and_ignored_by_policy(side: Side) -> None:
    net = Net()
    net.layers[0].a.requires_grad_(False)
    side.wrap(net, auto_wrap_policy=side.policy(), ignored_modules=[net.layers[0].a])


@row(**BOTH, quick=True)
def ignored_itself(side: Side) -> None:
    module = linear()
    side.wrap(module, ignored_modules=[module])


@row(**BOTH)
def ignored_itself_as_state(side: Side) -> None:
    module = linear()
    side.wrap(module, ignored_states=[module])


@row()
def ignored_stranger(side: Side) -> None:
    side.wrap(linear(), ignored_modules=[linear()])


@row()
def ignored_number(side: Side) -> None:
    side.wrap(linear(), ignored_modules=3)


@row()
def ignored_text(side: Side) -> None:
    side.wrap(linear(), ignored_states="weight")


@row()
def ignored_parameters_as_modules(side: Side) -> None:
    module = linear()
    side.wrap(module, ignored_modules=[module.weight])


@row()
def ignored_mixed(side: Side) -> None:
    module = two()
    side.wrap(module, ignored_states=[module[0], module[1].weight])


@row()
def ignored_both(side: Side) -> None:
    module = two()
    side.wrap(module, ignored_states=[module[0]], ignored_modules=[module[1]])


@row()
def ignored_module_as_list(side: Side) -> None:
    module = two()
    side.wrap(module, ignored_modules=module[0])


@row()
def ignored_generator(side: Side) -> int:
    module = two()
    model = side.wrap(module, ignored_states=(p for p in module[0].parameters()))
    return len(list(model.parameters()))


@row()
def ignored_wrapped(side: Side) -> None:
    module = two()
    module[0] = side.wrap(module[0])
    side.wrap(module, ignored_modules=[module[0]])


# -- materialising --


@contextmanager
def meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


@row(quick=True)
def init_fn_number(side: Side) -> None:
    with meta():
        module = linear()
    side.wrap(module, param_init_fn=3)


@row()
def init_fn_number_unused(side: Side) -> None:
    side.wrap(linear(), param_init_fn=3)


@row()
def init_fn_none_and_no_reset(side: Side) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

    with meta():
        module = Held()
    side.wrap(module)


@row()
def init_fn_raises(side: Side) -> None:
    def init(module: nn.Module) -> None:
        raise LookupError("boom")

    with meta():
        module = linear()
    side.wrap(module, param_init_fn=init)


@row()
def init_fn_does_nothing(side: Side) -> None:
    with meta():
        module = linear()
    trained(side, module, param_init_fn=lambda module: None)


@row(**BOTH)
def init_fn(side: Side) -> None:
    with meta():
        module = two()
    trained(side, module, param_init_fn=lambda m: m.to_empty(device=CPU, recurse=False) and None)


@row(quick=True)
def reset_raises(side: Side) -> None:
    with meta():
        module = linear()
    module.reset_parameters = lambda: [][1]
    side.wrap(module)


@row()
def device_text(side: Side) -> None:
    side.wrap(linear(), device_id="cpu")


@row()
def device_unknown(side: Side) -> None:
    side.wrap(linear(), device_id="nonsense")
