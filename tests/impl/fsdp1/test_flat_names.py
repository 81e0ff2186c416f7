"""The names of ``FullyShardedDataParallel`` are torch's: of parameters, buffers, modules and state dicts, in
their order, before, in and after each phase of training, for drawn trees of modules.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from differential.ranks.naming import Look, forms_of, found_by_name, names_of
from hypothesis import HealthCheck, Phase, given, seed, settings
from named_trees import WIDTH, Builder, Node, Own, Tree, trees
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fsdpbench import impl
from fsdpbench.impl.shared.torch_internals import current_graph_task_id


class Story:
    """One side trains a tree and looks at it in every phase."""

    def __init__(self, side: str, tree: Tree, ranks: int) -> None:
        self.tree, self.ranks = tree, ranks
        self.builder = Builder(side, tree)
        self.api = self.builder.api
        self.wrapper = self.api.FullyShardedDataParallel
        self.looks: list[tuple[str, Look]] = []
        self.model = nn.Module()

    def look(self, phase: str, *, forms: bool = True) -> None:
        """See all names; ``forms`` where both sides show parameters of the same shapes."""
        for name, module in self.model.named_modules():
            if module is self.model or isinstance(module, self.wrapper):
                self.looks.append((f"{phase}: '{name}'", names_of(module)))
            else:
                own = [key for key, _ in module.named_parameters(recurse=False)]
                self.looks.append((f"{phase}: '{name}'", {"own": own, "text": str(module)}))
        names = {module: name for name, module in self.model.named_modules()}
        wrappers = [self.wrapper.fsdp_modules(self.model, root_only=only) for only in (False, True)]
        found: Look = {
            "wrappers": [[names[wrapper] for wrapper in each] for each in wrappers],
            "originals": [[list(flat._fqns) for flat in wrapper.params] for wrapper in wrappers[0]],
        }
        self.looks.append((f"{phase}: wrappers", found))
        if forms or not self.tree.originals:  # in between torch shows tensors that are no parameters
            self.looks.append((f"{phase}: by name", found_by_name(self.model)))
        if forms:
            self.looks.append((f"{phase}: forms", self._forms("summon" in phase)))

    def _forms(self, whole: bool) -> Look:
        forms = forms_of(self.model)
        aligned = not (self.tree.uneven or self.tree.low)  # torch's parts of original parameters are
        if self.tree.originals and self.ranks > 1 and self.tree.strategy != "NO_SHARD" and not aligned:
            forms["forms"] = {name: form[1:] for name, form in forms["forms"].items()}
        return forms

    def run(self) -> str:
        """Go through all phases; returns the type of the exception that ended it, "" if none did."""
        try:
            with self.tree.eager(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.model = self.builder.build()
                self._phases()
        except Exception as error:
            self.error = error
            return type(error).__name__
        return ""

    def _phases(self) -> None:
        model = self.model
        self.look("made")
        self._summoned("made")
        for module in model.modules():
            if isinstance(module, Own):
                module.sees = self._inside
        loss = model(torch.ones(2, self.builder.width)).float().square().sum()
        self.look("after forward", forms=False)
        if loss.requires_grad:
            loss.backward()
            self._reshard_frozen()
        # Where all is frozen no backward comes: torch still shows whole tensors that are no parameters.
        self.look("after backward", forms=loss.requires_grad)
        self._summoned("after backward", with_grads=self.tree.originals)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        self.look("after step")
        self._saved(optimizer)
        model.float()
        self.look("converted")

    def _reshard_frozen(self) -> None:
        """Show what torch leaves unregistered after backward: see `test_frozen_units_stay_registered`."""
        for wrapper in torch_fsdp.FullyShardedDataParallel.fsdp_modules(self.model):
            handle = wrapper._handle
            if handle is None or not self.tree.originals or handle.uses_sharded_strategy:
                continue
            if not handle.flat_param.requires_grad:
                handle._use_sharded_views()

    def _inside(self, phase: str) -> None:
        # Original parameters that are gathered in backward are not listed by torch.
        if not self.tree.originals or current_graph_task_id() == -1:
            self.look(phase, forms=False)

    def _summoned(self, phase: str, *, with_grads: bool = False) -> None:
        inner = self.wrapper.fsdp_modules(self.model)[-1]
        ways: list[tuple[str, nn.Module, dict[str, Any]]] = [
            ("", self.model, {"with_grads": with_grads}),
            (" without recursion", self.model, {"recurse": False, "writeback": False}),
            (" of the last", inner, {"writeback": False}),
            (" on rank 0", self.model, {"rank0_only": True, "writeback": False}),
        ]
        for words, module, arguments in ways:
            with self.wrapper.summon_full_params(module, **arguments):
                self.look(f"{phase}, in summon_full_params{words}")
        if self.tree.outer:
            return
        self.model.apply(lambda module: self._applied(phase, module))
        self.look(f"{phase}, after apply")

    def _applied(self, phase: str, module: nn.Module) -> None:
        if module is self.model or isinstance(module, Own):
            self.look(f"{phase}, in apply")

    def _saved(self, optimizer: torch.optim.Optimizer) -> None:
        types = self.api.StateDictType
        for kind in (types.FULL_STATE_DICT, types.SHARDED_STATE_DICT, types.LOCAL_STATE_DICT):
            local = kind is types.LOCAL_STATE_DICT
            if local and ("HYBRID" in self.tree.strategy or self.tree.originals):
                continue  # refused with a mesh; torch's cannot be loaded with original parameters
            with self.wrapper.state_dict_type(self.model, kind):
                state = self.model.state_dict()
                found: Look = {"keys": list(state)}
                if not local:
                    found |= self._optimizer_names(optimizer)
                    found |= self._loaded(state)
            self.looks.append((f"saved {kind.name}", found))
            self.look(f"after saving {kind.name}")

    def _optimizer_names(self, optimizer: torch.optim.Optimizer) -> Look:
        state = self.wrapper.optim_state_dict(self.model, optimizer)
        return {
            "optimizer state": sorted(state["state"]),
            "optimizer groups": [group["params"] for group in state["param_groups"]],
        }

    def _loaded(self, state: dict[str, Any]) -> Look:
        given = dict(state, **{"some.other": torch.ones(1)})
        given.pop(next(iter(state), ""), None)
        answer = self.model.load_state_dict(given, strict=False)
        return {"missing": sorted(answer.missing_keys), "unexpected": sorted(answer.unexpected_keys)}


def case_tree(rank: int, tree: Tree, ranks: int) -> list[str]:
    """The differences between both sides."""
    theirs, ours = Story("torch", tree, ranks), Story("impl", tree, ranks)
    endings = theirs.run(), ours.run()
    found: list[str] = []
    for (phase, their), (same, our) in zip(theirs.looks, ours.looks, strict=False):
        if phase != same:
            found.append(f"phases {phase} and {same}")
            break
        found += [
            f"{phase} {key}:\n  torch {their.get(key)}\n  impl  {our.get(key)}"
            for key in {**their, **our}
            if their.get(key) != our.get(key)
        ]
        if found:
            break
    if not found and endings[0] != endings[1]:
        errors = [getattr(story, "error", None) for story in (theirs, ours)]
        found.append(f"endings {endings}: {errors}")
    return found or [f"ended {endings[0]}"]


def differences_of(pool: Any, ranks: int, number: int, examples: int) -> tuple[list[Any], dict[str, int]]:
    failed: list[Any] = []
    endings: dict[str, int] = {}

    @seed(number)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(trees(ranks))
    def draw(tree: Tree) -> None:
        answers = pool.run_everywhere(case_tree, tree=tree, ranks=ranks)
        for answer in answers:
            if answer[0].startswith("ended "):
                endings[answer[0]] = endings.get(answer[0], 0) + 1
            else:
                failed[:] = [tree, *answer]
                raise AssertionError("\n".join(answer[:3]))

    with contextlib.suppress(AssertionError):
        draw()
    return failed, endings


PARTS = (
    Node("own", ("fsdp",), children=(Node("linear", ("checkpoint",)), Node("batch", ("fsdp", "fsdp")))),
    Node("linear", ("checkpoint", "fsdp"), ignored="state"),
    Node("batch", ignored="module"),
)
TREES = {
    "flat": Tree(Node("own", ("checkpoint", "fsdp"), children=PARTS), outer=True),
    "originals": Tree(Node("own", ("fsdp",), children=PARTS), "SHARD_GRAD_OP", originals=True, uneven=True),
    "unsharded": Tree(Node("own", ("fsdp",), children=PARTS), "NO_SHARD", policy=True, low=True),
    "tied": Tree(Node("own", ("fsdp", "checkpoint"), children=(Node(), Node())), originals=True, tied=True),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_names_are_those_of_torch(two_ranks, tree: Tree) -> None:
    for found in two_ranks.run_everywhere(case_tree, tree=tree, ranks=2):
        assert found == ["ended "], "\n".join(found[:3])


def case_frozen_units(rank: int, strategy: str, low: bool) -> None:
    """torch forgets to show a frozen unit that is gathered when backward ends, if its address tells nothing.

    Without sharding and without a lower dtype what is gathered is the shard itself, so torch's
    `_catch_all_reshard` holds the unit for resharded. Nothing else resharded it: its input needs no gradient.
    """
    tree = Tree(Node("own", ("fsdp",), frozen=True, children=(Node(around=("fsdp",)),)), strategy, low=low)
    listed: dict[str, list[str]] = {}
    for side in ("torch", "impl"):
        model = Builder(side, replace(tree, originals=True)).build()
        before = [name for name, _ in model.named_parameters()]
        model(torch.ones(2, WIDTH)).float().sum().backward()
        listed[side] = [name for name, _ in model.named_parameters()]
        assert model.get_submodule("_fsdp_wrapped_module").weight.dtype is torch.float32
        if side == "impl":
            assert listed[side] == before
    forgets = strategy == "NO_SHARD" and not low
    assert (listed["torch"] != listed["impl"]) == forgets


@pytest.mark.parametrize(
    ("strategy", "low"), [("NO_SHARD", False), ("NO_SHARD", True), ("FULL_SHARD", False)]
)
def test_frozen_units_stay_registered(two_ranks, strategy: str, low: bool) -> None:
    two_ranks.run(case_frozen_units, strategy=strategy, low=low)


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", range(*map(int, os.environ.get("NAME_SEEDS", "1:33").split(":"))))
def test_many_trees_have_the_names_of_torch(one_rank, two_ranks, ranks: int, number: int) -> None:
    failed, endings = differences_of(one_rank if ranks == 1 else two_ranks, ranks, number, 25)
    print(endings)
    assert not failed, "\n".join(map(str, failed[:4]))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.layer2(torch.tanh(self.layer1(x)))))
        return y


def _trained_by_names(api: Any, originals: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Train ``layer1``, picked as a script for torch's FSDP1 does it, biases without decay."""
    torch.manual_seed(0)
    model, wrapper = Layers(), api.FullyShardedDataParallel
    arguments: dict[str, Any] = {"use_orig_params": originals, "device_id": torch.device("cpu")}
    model.layer1 = wrapper(model.layer1, **arguments)
    model = wrapper(model, **arguments)
    prefix = "_fsdp_wrapped_module.layer1._fsdp_wrapped_module."
    chosen = {name: p for name, p in model.named_parameters() if name.startswith(prefix)}
    decayed = [p for name, p in chosen.items() if not name.endswith("bias")]
    others = [p for name, p in chosen.items() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(2, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        model.zero_grad()
    with wrapper.summon_full_params(model):
        return list(chosen), {name: p.detach().clone() for name, p in model.named_parameters()}


def case_trained_by_names(rank: int, originals: bool) -> None:
    (their_names, theirs), (our_names, ours) = (
        _trained_by_names(api, originals) for api in (torch_fsdp, impl)
    )
    assert our_names == their_names != []
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, msg=name)
    torch.manual_seed(0)
    changed = {name for name, before in Layers().named_parameters() if not torch.equal(before, ours[name])}
    assert changed == {"layer1.weight", "layer1.bias"}


@pytest.mark.parametrize("originals", [False, True])
def test_optimizer_of_prefixed_names_trains_what_torch_trains(two_ranks, originals: bool) -> None:
    two_ranks.run(case_trained_by_names, originals=originals)


def case_attributes(rank: int) -> None:
    """What a flat parameter's modules show as attributes: nothing finds it as a parameter, nor trains it."""
    for api, words in ((torch_fsdp, r"non-leaf|base has been modified"), (impl, "a module's attribute")):
        model: Any = api.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        for _ in range(2):
            with pytest.raises(AttributeError, match=r"not an nn\.Parameter"):
                model.get_parameter("_fsdp_wrapped_module.weight")
            assert not isinstance(model.weight, nn.Parameter)
            assert model.get_parameter("_flat_param") is model._flat_param
            with pytest.raises((ValueError, RuntimeError), match=words):
                torch.optim.SGD([model.weight], lr=0.1).step()
            model(torch.ones(2, 4)).sum().backward()


def case_summoned(rank: int) -> None:
    """An optimizer of what ``summon_full_params`` shows steps inside of it, and is refused afterwards."""
    model = impl.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with model.summon_full_params(model):
        optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name == "weight"], lr=0.1)
        model.get_parameter("weight").grad = torch.ones(4, 4)
        before = model.weight.detach().clone()
        optimizer.step()
        changed = model.weight.detach().clone()
    torch.testing.assert_close(changed, before - 0.1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="inside of summon_full_params"):
        optimizer.step()
    with model.summon_full_params(model):
        torch.testing.assert_close(model.weight.detach(), changed)


def test_optimizer_made_inside_of_summon_full_params(two_ranks) -> None:
    two_ranks.run(case_summoned)


def test_attributes_are_no_parameters(two_ranks) -> None:
    two_ranks.run(case_attributes)
