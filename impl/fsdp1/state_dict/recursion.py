"""The hooks of a ``FullyShardedDataParallel`` in ``state_dict()`` and ``load_state_dict()``.

Both use the recursion of ``nn.Module``, so that wrappers may be nested in plain modules in any way. Each
wrapper handles its own unit in the hooks around its part of the recursion::

    state_dict()        before   show full parameters (or empty tensors of their shapes) in the modules
                        after    store the values under the original names; show sharded parameters again
    load_state_dict()   before   write this rank's part of the values into the shard; let nn.Module load each
                                 parameter from itself, so that nn.Module reports missing keys and the like
                        after    convert the reported names to the original ones

So loading full values needs no gather: each rank takes its part. ``state_values.py`` has the values of each
kind of state dict.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import StateDict

from ...runtime.presentation import FLAT_NAME, WRAPPED, plain_name
from ...runtime.stage import Stage
from ...shared import error_text
from ..parameter_names import named_unit, plain_text
from ..settings import FullStateDictConfig, StateDictSettings, StateDictType
from ..summon import ShownUnit
from .state_values import LoadedUnit, local_value, placeholders, sharded_parameters, whole_parameters

Tensor = TypeVar("Tensor", bound=torch.Tensor)

# Attribute that holds a wrapper's ``WrapperStates``, outside of the module's registries.
_STATES = "_fsdp_states"


class WrapperStates:
    """The state dict settings and hooks of one wrapper; see the module docstring.

    Args:
        mesh: the ``device_mesh`` of the wrapper.
        buffer_dtypes: for each module, the dtypes of its buffers before mixed precision.
    """

    def __init__(
        self,
        wrapper: nn.Module,
        stage: Stage,
        mesh: DeviceMesh | None,
        buffer_dtypes: Mapping[nn.Module, Mapping[str, torch.dtype]],
    ) -> None:
        self.settings = StateDictSettings.decide(StateDictType.FULL_STATE_DICT)
        # Whether ``summon_full_params`` shows full parameters now.
        self.summoned = False
        self.mesh = mesh
        self._stage = stage
        self._buffer_dtypes = buffer_dtypes
        self._shown: list[ShownUnit] = []
        self._values: list[list[Any] | None] = []
        self._load_errors: list[str] = []
        # Index of this wrapper's first missing key, and positions of the modules inside it by name.
        self._loading: tuple[int, dict[str, int]] = (0, {})
        wrapper.__dict__[_STATES] = self
        wrapper.register_state_dict_pre_hook(self._before_save)
        wrapper.register_state_dict_post_hook(_after_save)
        wrapper.register_load_state_dict_pre_hook(self._before_load)
        wrapper.register_load_state_dict_post_hook(self._after_load)

    @property
    def is_sharded(self) -> bool:
        """Return whether this wrapper's parameters are sharded over ranks."""
        return any(unit.groups.shard is not None for unit in self._stage.units)

    def listed(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``named`` as the wrapper lists it: without wrappers' names inside ``summon_full_params``."""
        summoned = self.summoned
        for name, tensor in named:
            yield (name.replace(f"{WRAPPED}.", "") if summoned else name), tensor

    def current(self) -> StateDictSettings:
        """Return the settings in effect: without sharding all values are full.

        Raises:
            RuntimeError: the settings do not fit the way this module was wrapped.
        """
        settings = self.settings.with_mesh(self.mesh is not None)
        if self.is_sharded or settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            return settings
        if self._stage.units:
            warnings.warn(error_text("recursion.not_sharded", settings.state_dict_type.name), stacklevel=2)
        config = FullStateDictConfig(offload_to_cpu=settings.state_dict_config.offload_to_cpu)
        return StateDictSettings.decide(StateDictType.FULL_STATE_DICT, config)

    # -- saving ----------------------------------------------------------------------------------------------

    def _before_save(self, wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._stage.check_idle("state_dict()", AssertionError)
        self._values = []
        settings = self.current()
        if self.summoned:
            if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
                raise RuntimeError(error_text("recursion.before_save", settings.state_dict_type.name))
            return
        offload = settings.state_dict_config.offload_to_cpu
        for unit in self._stage.units:
            unit.reshard_by_hand()
            unit.take_up_changes()
            shown = ShownUnit(unit)
            if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
                config: Any = settings.state_dict_config
                keep = not config.rank0_only or cast(Any, wrapper).rank == 0
                values: list[Any] | None = whole_parameters(unit, keep=keep, offload=offload)
                if values is not None:
                    shown.show_values(values)
            elif settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
                values = sharded_parameters(unit, self.mesh, offload=offload)
                shown.show_values(placeholders(unit))
            else:
                unit.reshard()
                values = [local_value(unit, offload=offload)]
            self._values.append(values)
            self._shown.append(shown)

    def put_values(self, wrapper: nn.Module, state_dict: StateDict, prefix: str) -> None:
        """Store the wrapper's own values under the original names, after the recursion below it."""
        _rename(state_dict, f"{prefix}{WRAPPED}.", prefix)
        settings = self.current()
        kind, config = settings.state_dict_type, settings.state_dict_config
        sharded = kind is StateDictType.SHARDED_STATE_DICT
        for unit, values in zip(self._stage.units, self._values, strict=False):
            keys = named_unit(unit, wrapper, prefix).names
            if kind is StateDictType.LOCAL_STATE_DICT:
                assert values is not None
                _drop(state_dict, keys)
                state_dict[prefix + FLAT_NAME] = values[0]
            elif values is None:
                _drop(state_dict, [*keys, (prefix + FLAT_NAME,)])
            else:
                for value, own in zip(values, keys, strict=True):
                    for key in own:
                        if sharded or isinstance(state_dict.get(key), nn.Parameter):
                            state_dict[key] = value
        self._finish_buffers(wrapper, state_dict, prefix, config.offload_to_cpu)

    def _finish_buffers(self, wrapper: nn.Module, state_dict: StateDict, prefix: str, offload: bool) -> None:
        """Cast buffers to their original dtype and offload them if set; drop them if this rank gets none."""
        dropped = any(values is None for values in self._values)
        for module_name, module in wrapper.named_modules(remove_duplicate=False):
            own_dtypes = self._buffer_dtypes.get(module, {})
            for name in module._buffers:
                # The prefix comes from the recursion; outer wrappers remove their parts of names later.
                key = prefix + plain_name(f"{module_name}.{name}" if module_name else name)
                value = state_dict.get(key)
                if not isinstance(value, torch.Tensor):
                    continue
                if dropped:
                    del state_dict[key]
                    continue
                value = value.to(dtype=own_dtypes.get(name), copy=name in own_dtypes)
                state_dict[key] = value.cpu() if offload else value

    def end_save(self) -> None:
        """Show the sharded parameters again; also after an exception."""
        for shown in self._shown:
            shown.hide(writeback=False)
        self._shown, self._values = [], []

    # -- loading ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before_load(
        self,
        wrapper: nn.Module,
        state_dict: StateDict,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._stage.check_idle("load_state_dict()", AssertionError)
        self._load_errors = error_msgs
        inside = enumerate(wrapper.named_modules(prefix=prefix[:-1], remove_duplicate=False))
        self._loading = len(missing_keys), {plain_name(name): place for place, (name, _) in inside}
        if not self.summoned:
            kind = self.current().state_dict_type
            for unit in self._stage.units:
                unit.reshard()
                unit.take_up_changes()
                loaded = LoadedUnit(named_unit(unit, wrapper, prefix), kind)
                loaded.take(state_dict)
                error_msgs.extend(loaded.errors)
                missing_keys.extend(loaded.leave_to_module(state_dict))
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)

    def _after_load(self, wrapper: nn.Module, incompatible: Any) -> None:
        for texts in (*incompatible, self._load_errors):
            texts[:] = [plain_text(text) for text in texts]
        # Missing keys of a flat parameter come first, because they were added before the recursion.
        (first, places), missing = self._loading, incompatible.missing_keys
        missing[first:] = sorted(missing[first:], key=lambda key: places.get(key.rpartition(".")[0], -1))
        self._load_errors, self._loading = [], (0, {})


def states_of(module: nn.Module) -> WrapperStates | None:
    """Return the ``WrapperStates`` of a wrapper, ``None`` for other modules."""
    return module.__dict__.get(_STATES)


def _after_save(wrapper: nn.Module, state_dict: StateDict, prefix: str, metadata: Any) -> None:
    """Call ``put_values`` of a wrapper. A function, because ``nn.Module`` sets an attribute on the hook."""
    states = states_of(wrapper)
    assert states is not None
    states.put_values(wrapper, state_dict, prefix)


def _rename(state_dict: Any, old: str, new: str) -> None:
    """Replace the prefix ``old`` of keys, and of module versions in the metadata, by ``new``."""
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[new + key[len(old) :]] = state_dict.pop(key)
    versions = getattr(state_dict, "_metadata", {})
    for name in [name for name in versions if f"{name}.".startswith(old)]:
        versions[(new + f"{name}."[len(old) :])[:-1]] = versions.pop(name)


def _drop(state_dict: StateDict, keys: Sequence[Sequence[str]]) -> None:
    for each in keys:
        for key in each:
            state_dict.pop(key, None)
