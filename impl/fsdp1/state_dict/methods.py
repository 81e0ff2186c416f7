"""The state dict methods of ``FullyShardedDataParallel``, with torch's names and arguments.

They are in a base class of the wrapper, so that ``FullyShardedDataParallel.optim_state_dict(...)`` works as
in torch. The implementation is in ``recursion.py``, ``state_values.py`` and the ``optim_*.py`` files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import StateDict

from ...shared import error_text
from ...shared.torch_internals import INTERNALS
from ..settings import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from .optim_load import state_to_load
from .optim_parameters import LoadFrom, OptimInput, OptimStateKeyType, goes_by_name, keyed_parameters, rekey
from .optim_state import SaveAs, consolidated_state
from .recursion import WrapperStates, states_of


class StateDictMethods(nn.Module):
    """Methods for state dicts of a model and of its optimizer."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict, with values of the type set by ``set_state_dict_type``. Collective."""
        states = states_of(self)
        assert states is not None
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            states.end_save()

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of ``state_dict()`` and ``optim_state_dict()`` for all wrappers in ``module``.

        Args:
            state_dict_config, optim_state_dict_config: configs of that type; ``None`` for its defaults.

        Returns:
            The previous settings of the first wrapper.

        Raises:
            ValueError: no wrapper in ``module``.
            RuntimeError: a config of another type, or a type that the wrapping does not support.
        """
        found = _wrappers(module, "set_state_dict_type")
        settings = StateDictSettings.decide(state_dict_type, state_dict_config, optim_state_dict_config)
        for states in found:
            if states.is_sharded:
                settings.with_mesh(states.mesh is not None)
        before = found[0].settings
        for states in found:
            states.settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the settings of the wrappers in ``module``.

        Raises:
            ValueError: no wrapper in ``module``.
            AssertionError: the wrappers have different settings.
        """
        first, *others = _wrappers(module, "get_state_dict_type")
        for other in others:
            if other.settings != first.settings:
                kind = type(module).__name__
                raise AssertionError(error_text("methods.settings", kind, first.settings, other.settings))
        return first.settings.with_mesh(first.mesh is not None) if first.is_sharded else first.settings

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Set ``state_dict_type`` inside this context and restore it at exit, also after an exception."""
        found = _wrappers(module, "state_dict_type")
        before = [states.settings for states in found]
        StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for states, settings in zip(found, before, strict=True):
                states.settings = settings

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict | None = None,
        group: ProcessGroup | None = None,
    ) -> StateDict:
        """Return an optimizer's state under the original names, of the type set by ``set_state_dict_type``.

        Collective. ``LOCAL_STATE_DICT`` gives sharded values, as in torch.

        Args:
            model: the model of the parameters of ``optim``.
            optim_state_dict: the result of ``optim.state_dict()``, if already available.
            group: with ``rank0_only``, the group whose rank 0 gets the dict; ``None`` for all ranks.

        Raises:
            ValueError: a parameter of ``optim`` is not in ``model``.
            RuntimeError: a state tensor does not have the parameter's shape, or states differ between ranks.
        """
        settings = StateDictMethods.get_state_dict_type(model)
        sharded = settings.state_dict_type is not StateDictType.FULL_STATE_DICT
        rank0_only = getattr(settings.optim_state_dict_config, "rank0_only", False)
        how = SaveAs(
            sharded=sharded,
            keep=not rank0_only or dist.get_rank(group) == 0,
            offload=settings.optim_state_dict_config.offload_to_cpu,
        )
        return _save(model, optim, optim_state_dict, None, how)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> StateDict:
        """Return the state dict to pass to ``optim.load_state_dict`` on this rank. Collective.

        Args:
            optim_state_dict: the result of ``optim_state_dict``, or one of an unwrapped model under names
                (``rekey_optim_state_dict``).
            is_named_optimizer: whether the keys of ``optim`` are names.
            load_directly: whether to load the result too.
            group: with ``rank0_only``, the group whose rank 0 has the dict; ``None`` for all ranks.

        Raises:
            ValueError: names, shapes or groups do not fit ``model`` and ``optim``.
            RuntimeError: ranks got different states.
        """
        settings = StateDictMethods.get_state_dict_type(model)
        source = LoadFrom(
            sharded=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
            rank0=getattr(settings.optim_state_dict_config, "rank0_only", False),
            group=group,
        )
        keys = keyed_parameters(model, optim, by_name=is_named_optimizer)
        existing = optim.state if is_named_optimizer else None
        result = state_to_load(model, optim_state_dict, keys, optim.param_groups, source, existing)
        if load_directly:
            optim.load_state_dict(result)
        return result

    # -- older methods ---------------------------------------------------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput | None = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> StateDict:
        """Return the state dict of ``optim`` with full values on the CPU, whatever type is set."""
        keep = not rank0_only or dist.get_rank(group) == 0
        return _save(model, optim, None, optim_input, SaveAs(sharded=False, keep=keep, offload=True))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup | None = None
    ) -> StateDict:
        """Return ``optim_state_dict`` with sharded values on the CPU, whatever type is set."""
        return _save(model, optim, None, None, SaveAs(sharded=True, keep=True, offload=True))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Return the state to load from a ``full_optim_state_dict`` on every rank; no communication."""
        return _load(model, full_optim_state_dict, optim_input, optim, LoadFrom(compare=False))

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
    ) -> StateDict:
        """Return ``optim_state_dict_to_load`` for sharded values."""
        return _load(model, sharded_optim_state_dict, None, optim, LoadFrom(sharded=True))

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> StateDict:
        """Return ``optim_state_dict_to_load`` for full values that only rank 0 of ``group`` has."""
        given = full_optim_state_dict or {}
        return _load(model, given, optim_input, optim, LoadFrom(rank0=True, group=group))

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Convert keys of ``optim_state_dict`` to names or numbers, to exchange it with unwrapped models."""
        return rekey(optim_state_dict, optim_state_key_type, model, optim_input, optim)


def _save(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: StateDict | None,
    optim_input: OptimInput | None,
    how: SaveAs,
) -> StateDict:
    state = optim.state_dict() if given is None else given
    keys = keyed_parameters(model, optim, optim_input, by_name=goes_by_name(state))
    return consolidated_state(model, state, keys, how)


def _load(
    model: nn.Module,
    given: StateDict,
    optim_input: OptimInput | None,
    optim: torch.optim.Optimizer | None,
    source: LoadFrom,
) -> StateDict:
    groups = optim.param_groups if optim is not None and optim_input is None else None
    keys = keyed_parameters(model, optim, optim_input)
    return state_to_load(model, given, keys, groups, source)


def _wrappers(module: nn.Module, call: str) -> list[WrapperStates]:
    found = [states for each in module.modules() if (states := states_of(each)) is not None]
    if not found:
        raise ValueError(error_text("methods.no_wrapper", call, type(module).__name__))
    return found


# -- torch.distributed.checkpoint.state_dict -----------------------------------------------------------------


class _EitherWrapper:
    """A substitute for torch's class in those functions, which also finds our wrappers."""

    def __init__(self, torchs: Any) -> None:
        self._torchs = torchs

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, (StateDictMethods, self._torchs))

    def fsdp_modules(self, model: nn.Module) -> list[Any]:
        ours = [each for each in model.modules() if isinstance(each, StateDictMethods)]
        return ours or self._torchs.fsdp_modules(model)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            model = args[0] if args else kwargs["module"]
            return getattr(self.fsdp_modules(model)[0], name)(*args, **kwargs)

        return call


@cache
def serve_checkpoint_functions() -> None:
    """Patch ``get_state_dict``, ``set_state_dict`` and the like to find our wrappers like torch's."""
    from torch.distributed.checkpoint import state_dict

    functions: Any = state_dict
    name = INTERNALS["fsdp_state_of_module"].path.rpartition(":")[2]
    find = getattr(functions, name)
    functions.FSDP = _EitherWrapper(functions.FSDP)
    setattr(functions, name, lambda each: states_of(each) or find(each))
