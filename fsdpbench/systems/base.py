"""The interface of a system under test: it wraps a model, and knows which settings it supports.

A setting that a system lacks is in `absent`; a value that it does not support is refused by `refuses`. Both
are *not applicable*: never a point of a sweep, reported once, and never silently ignored.
"""

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fsdpbench.base.configuration.config import PARALLEL, Config, Degrees, shard_size_of
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.settings import SETTINGS
from fsdpbench.sim.model.software import CURRENT
from fsdpbench.systems import model_code
from fsdpbench.systems.narrow import refuse_narrow, refused_by_software, workload_of
from fsdpbench.workloads import Workload

if TYPE_CHECKING:  # importing torch takes most of a second; commands that only plan do not need it
    import torch
    from torch import nn

SWITCHES_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Environment variables that disable `torch.compile` silently if set to 1."""
MOST_ON_THIS_HOST = 8 * 2**30
"""The most bytes of offloaded tensors that a simulated rank allocates in real memory."""
ABSENT = table_beside(__file__, "absent.toml")
"""Settings that our systems lack, with reasons, by system."""


@dataclass(frozen=True)
class BuildContext:
    """The input of `System.wrap`: the configuration, the workload and this rank's device."""

    config: Config
    workload: Workload
    device: "torch.device"
    deferred: bool
    """Build on the meta device and materialize after sharding, if one rank cannot hold the whole model."""

    def build_model(self) -> "nn.Module":
        """Build the unwrapped model with seeded weights, on the meta device if deferred."""
        from fsdpbench.systems.training import build_model

        return build_model(self.workload, self.config.settings, "meta" if self.deferred else self.device)

    def materialising(self) -> AbstractContextManager[object]:
        """Return the context in which a model gets its memory: on a simulated GPU's host it takes none."""
        if self.device.type != "sim" or not self.config.settings.cpu_offload or self.config.sanitize:
            return nullcontext()
        from fsdpbench.sim.torch_device.operators.host_memory import HostShapes

        return HostShapes()

    @property
    def shard_size(self) -> int:
        """Return the number of ranks that share one copy of the model."""
        return shard_size_of(self.config)


class System(ABC):
    """One system under test. Instances have no state; one instance serves all configurations."""

    name: str
    summary: str
    devices: ClassVar[frozenset[str]] = frozenset({"cuda", "cpu", "sim"})
    shards: ClassVar[bool] = True
    software: str = CURRENT
    """The software profile to simulate it with by default."""
    absent: ClassVar[Mapping[str, str]] = {}
    parallel: ClassVar[frozenset[str]] = frozenset()
    """The supported degrees among `tp`, `cp` and `ep`, in addition to its own sharding."""
    package: ClassVar[str | None] = None
    """The module that must be installed for it, unless the bench itself depends on it."""
    installation: ClassVar[str] = ""
    """The command that installs it."""

    @property
    def is_installed(self) -> bool:
        """Return whether its package is installed, without importing it."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def require(self) -> None:
        """Raise `UsageError` if its package is not installed."""
        if not self.is_installed:
            raise UsageError(error_text("base.not_installed", self.name, self.package, self.installation))

    def not_applicable(self, config: Config) -> dict[str, str]:
        """Return why it cannot run `config`, by setting: device, software, parallelism and `refuses`."""
        if config.device not in self.devices:
            known = ", ".join(sorted(self.devices))
            return {"device": f"it runs on {known}, not on {config.device}"}
        refused = {**refused_by_software(config), **self._refuses_parallel(config), **self.refuses(config)}
        refused |= refuse_graph(config) | model_code.refuse_model_code(workload_of(config), config.settings)
        refused |= model_code.refuse_attention(config, workload_of(config))
        if config.settings.compile and config.sanitize:
            # While a dispatch mode is active, Dynamo silently compiles nothing.
            refused["compile"] = "the sanitizer follows eager programs: leave --sanitize or compile out"
        if config.settings.compile_loss:
            refused |= _refuse_compiled_loss(config)
        by = next((name for name in SWITCHES_OFF if os.environ.get(name) == "1"), None)
        if config.settings.compile and by is not None:
            refused["compile"] = f"{by}=1 in the environment has torch compile nothing: unset it"
        return refused

    def absent_settings(self, config: Config) -> Mapping[str, str]:
        """Return the settings that this system lacks in this configuration: name -> reason."""
        return self.absent

    def refuses(self, config: Config) -> dict[str, str]:
        """Refuse values that this system does not support: setting -> reason. Empty: it can run `config`."""
        return {}

    def _refuses_parallel(self, config: Config) -> dict[str, str]:
        return {
            name: f"{self.name} shards over all ranks alone; {name} is for impl-fsdp2 and torch-fsdp2"
            for name in PARALLEL
            if getattr(config.settings, name) > 1 and name not in self.parallel
        }

    @abstractmethod
    def wrap(self, context: BuildContext) -> "nn.Module":
        """Build the model and wrap it. The result is called as `model(*batch) -> loss`."""

    def make_optimizer(self, model: "nn.Module", config: Config) -> "torch.optim.Optimizer":
        """Make the optimizer of the wrapped model. Its `step` and `zero_grad` end a step."""
        from fsdpbench.systems.training import make_optimizer

        return make_optimizer(config.settings, model, workload_of(config).block_classes, self.make_muon)

    def make_muon(self, matrices: "list[nn.Parameter]") -> "torch.optim.Optimizer":
        """Make Muon for this system's users; by default torch's."""
        import torch

        return torch.optim.Muon(matrices, lr=1e-3)

    def forward_context(self, config: Config, device: "torch.device") -> AbstractContextManager[object]:
        """Return a context manager for each forward."""
        return nullcontext()

    def microbatch_of(
        self, model: "nn.Module", batch: "tuple[torch.Tensor, ...]"
    ) -> "AbstractContextManager[tuple[torch.Tensor, ...]]":
        """Return a context manager for forward and backward of `batch` that yields this rank's part of it."""
        return nullcontext(batch)

    def backward_context(self, config: Config) -> AbstractContextManager[object]:
        """Return a context manager for each backward."""
        return nullcontext()

    def microbatch(self, model: "nn.Module", *, sync: bool) -> AbstractContextManager[object]:
        """Return a context manager for one microbatch; with `sync` False its gradients are not reduced."""
        return nullcontext()

    def clip(self, model: "nn.Module", largest: float) -> None:
        """Clip the total norm of all gradients, including those of other ranks, to `largest`."""
        from fsdpbench.systems.training import clip_gradients

        clip_gradients(model.parameters(), largest)

    def backward(self, model: "nn.Module", loss: "torch.Tensor", *, is_last: bool) -> None:
        """Run backward of one microbatch. `loss` is already scaled; `is_last`: the step's last microbatch."""
        loss.backward()


def refuse_common(config: Config) -> dict[str, str]:
    """Refuse sizes that do not divide evenly, and settings that exclude each other: setting -> reason."""
    settings, refused = config.settings, {}
    size, ranks = shard_size_of(config), Degrees.of(config).sharding
    if ranks % size:
        refused["shard_size"] = f"{ranks} ranks cannot be divided into copies of {size}"
    if settings.shard_size is not None and "HYBRID" not in settings.strategy:
        refused["shard_size"] = f"it belongs to the hybrid strategies, not to {settings.strategy}"
    if settings.cpu_offload and config.device == "sim":
        refused |= _refuse_host_memory(config)
    refused |= refuse_offload(config) | refuse_narrow(config)
    return refused | _refuse_keeping_last(config) | refuse_lora(config) | refuse_optimizer(config)


def _refuse_host_memory(config: Config) -> dict[str, str]:
    """Refuse to offload more than this machine may hold, where operators need the values of host tensors."""
    settings, nbytes = config.settings, workload_of(config).training_state_bytes / shard_size_of(config)
    if config.sanitize:  # which follows every access
        part = "what --sanitize follows on the host"
    elif settings.grad_accum > 1 and settings.grad_sync == "every":  # added up during backward
        part, nbytes = "gradients that are accumulated on the host", nbytes / 4
    else:
        return {}
    if nbytes <= MOST_ON_THIS_HOST:
        return {}
    text = error_text("base.offloads_too_much", part, nbytes / 2**30, MOST_ON_THIS_HOST / 2**30)
    return {"cpu_offload": text}


def refuse_under(name: str, config: Config) -> dict[str, str]:
    """Refuse what the system `name` of another package does not support: setting -> reason."""
    refused, settings = refuse_common(config), config.settings
    if settings.optimizer == "muon":
        refused["optimizer"] = f"the bench gives {name} torch's own AdamW or SGD"
    if settings.grad_sync == "last" and settings.grad_accum > 1:
        refused["grad_sync"] = f"{name} reduces sharded gradients after every microbatch"
    if settings.compile:
        refused["compile"] = f"the bench does not compile blocks under {name}'s hooks"
    return refused


def _refuse_compiled_loss(config: Config) -> dict[str, str]:
    if not config.settings.compile:
        return {"compile_loss": "it belongs to compile, which is off"}
    if not model_code.has_token_loss(workload_of(config)):
        return {"compile_loss": f"{config.model} has no loss of tokens to compile"}
    return {}


def _refuse_keeping_last(config: Config) -> dict[str, str]:
    """Refuse `keep_last_unsharded` if it would have no effect."""
    settings = config.settings
    if not settings.keep_last_unsharded:
        return {}
    if settings.wrap == "root":
        return {"keep_last_unsharded": "there are no units below the root, which is kept anyway"}
    kept = settings.reshard_after_forward is False or settings.strategy not in ("FULL_SHARD", "HYBRID_SHARD")
    if isinstance(settings.reshard_after_forward, str):
        return {"keep_last_unsharded": "reshard_after_forward says it for each unit: leave it out"}
    if kept and not settings.reshard_after_forward:
        return {"keep_last_unsharded": "all units keep their parameters after forward already"}
    return {}


def refuse_lora(config: Config) -> dict[str, str]:
    """Refuse settings of adapters if there are no adapters: setting -> reason."""
    settings = config.settings.to_dict()
    return {
        name: "it belongs to lora, which is off"
        for name in ("lora_targets", "lora_base")
        if not settings["lora"] and settings[name] != SETTINGS[name].default
    }


def refuse_lora_in_flat_parameters(config: Config) -> dict[str, str]:
    """Refuse adapters of another dtype ("Must flatten tensors with uniform dtype"): setting -> reason."""
    settings = config.settings
    if settings.lora and settings.lora_base == "4bit":
        return {"lora_base": error_text("base.flat_bytes")}
    if settings.lora and settings.param_dtype != "fp32":
        return {"lora": error_text("base.flat_dtypes", settings.param_dtype)}
    return {}


def refuse_graph(config: Config) -> dict[str, str]:
    """Refuse to capture the step of `config` as a graph: setting -> reason. Obstacles in the program itself
    are found when it runs (`sim/graph`)."""
    settings = config.settings
    if settings.graph == "none":
        return {}
    why = None
    if config.device != "sim":
        why = f"it is a what-if of simulated GPUs, not of {config.device}: --device sim"
    elif settings.compile:
        why = "compiled blocks have graphs of their own, which are not nested here: leave compile out"
    elif settings.optimizer in ("adamw-foreach", "adamw-loop"):
        why = f"{settings.optimizer} counts its steps on the host, a graph would repeat one: use adamw"
    elif settings.optimizer_dtype is not None:
        why = "this AdamW counts its steps on the host, a graph would repeat one: leave optimizer_dtype"
    elif settings.cpu_offload:
        why = "the optimizer of offloaded shards runs on the host: leave cpu_offload out"
    elif config.sanitize or config.soak is not None:
        other = "--sanitize" if config.sanitize else "--soak"
        why = f"{other} follows steps that run by themselves: leave one of them out"
    elif config.software is not None:
        why = f"the trainer of software {config.software} is not watched: leave --software out"
    return {} if why is None else {"graph": why}


def refuse_offload(config: Config) -> dict[str, str]:
    """Refuse to offload activations under `config`: setting -> reason."""
    settings = config.settings
    if not settings.activation_offload:
        return {}
    name = "activation_offload"
    if settings.wrap == "root":
        return {name: "there are no units below the root, which would fetch all of it back together"}
    if settings.compile:
        return {name: "a compiled block keeps its saved tensors to itself: leave compile out"}
    if settings.cpu_offload and config.device == "sim":
        return {name: error_text("base.two_offloads")}
    for other in PARALLEL:
        if getattr(settings, other) > 1:
            return {name: f"tensors that {other} saves are parts of others: leave {other} at 1"}
    return {}


def refuse_optimizer(config: Config) -> dict[str, str]:
    """Refuse optimizers that other settings of `config` exclude: setting -> reason."""
    settings, refused = config.settings, {}
    if settings.optimizer_dtype is not None and settings.optimizer not in ("adamw", "muon"):
        refused["optimizer_dtype"] = f"it is AdamW's (optimizer=adamw or muon), not {settings.optimizer}'s"
    if settings.cpu_offload and config.device == "sim":
        if settings.optimizer_dtype is not None:
            refused["optimizer_dtype"] = "on the host (cpu_offload) only torch's own AdamW is priced"
        if settings.optimizer == "muon":
            refused["optimizer"] = "on the host (cpu_offload) only AdamW and SGD are priced, not Muon"
    return refused
