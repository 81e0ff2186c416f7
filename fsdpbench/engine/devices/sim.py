"""Simulated GPUs: rank 0 of any cluster in this process, with a simulated clock, network and allocator."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.base.configuration.config import DEFAULT_HARDWARE, Config, WhatIf
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.result_sections import MemoryAccount
from fsdpbench.engine.devices.base import AllocatorReadings, Placement, StepMemory, Tracer
from fsdpbench.engine.measuring.soak import TrainingLoop
from fsdpbench.engine.measuring.warmup import WINDOW, is_stable
from fsdpbench.sim import Simulation
from fsdpbench.sim import simulation as simulator
from fsdpbench.sim.followers.account import Account, Lines
from fsdpbench.sim.followers.graph import GraphSession
from fsdpbench.sim.model.allocator.conf import AllocatorConf
from fsdpbench.sim.model.keys import KEYS
from fsdpbench.sim.model.profile import HardwareProfile, load_profile
from fsdpbench.sim.model.software import CURRENT, TrainerSoftware, load_software
from fsdpbench.sim.model.timeline import Timeline
from fsdpbench.sim.torch_device.operators.host_memory import HostShapes
from fsdpbench.workloads import replacements
from fsdpbench.workloads.families.gpt import GPT


def preload() -> None:
    """Register the device and load the default hardware profile before processes are forked."""
    simulator.preload()
    load_profile(DEFAULT_HARDWARE)


def sharing_plans(log: str | None) -> AbstractContextManager[None]:
    """Reuse plans of earlier configurations from `log`, and add new ones to it; do nothing without a log."""
    return nullcontext() if log is None else simulator.sharing_plans(log)


class Tells:
    """Reports of a simulated device, from its profile, software, simulation and memory account."""

    def __init__(self, config: Config, profile: HardwareProfile) -> None:
        self._config = config
        self._profile = profile
        self._software = load_software(config.software or CURRENT)
        self._simulation: Simulation | None = None
        self._account: Account | None = None

    def describe(self) -> JsonObject:
        described = {
            "name": self._profile.name,
            "title": self._profile.title,
            "simulated": True,
            "source": self._profile.source,
            "memory_bytes": self._profile.memory_bytes,
        }
        if self._config.gpus > self._config.ranks_per_node:
            described["node_network"] = self._profile.node_words(self._config.ranks_per_node)
        if self._config.jitter is not None:
            jitter = self._config.jitter.to_text()
            described |= {"jitter": jitter, "title": f"{self._profile.title} with jitter ({jitter})"}
        if self._config.software is not None:
            described |= {"software": self._software.name, "software_source": self._software.source}
        return described

    @property
    def sanitizer(self) -> JsonObject | None:
        """Return what the sanitizer has found; None if it does not run."""
        found = None if self._simulation is None else self._simulation.sanitizer
        return None if found is None else found.to_dict()

    @property
    def memory_account(self) -> MemoryAccount | None:
        """Return the current holders of memory; None if no account is kept."""
        return None if self._account is None else self._account.report()

    @property
    def unknown_operators(self) -> dict[str, int]:
        """Return the number of calls by operator, of operators whose time is estimated from bytes alone."""
        return self._open_simulation().unknown_operators

    @property
    def network_share(self) -> float | None:
        """Return the time of collectives between nodes or over PCIe as a share of the time since the first
        one; None if there is none."""
        simulation = self._open_simulation()
        since = simulation.accelerator.between_nodes_since
        if since is None or simulation.cpu_ns() <= since:
            return None
        return simulation.accelerator.between_nodes_ns / (simulation.cpu_ns() - since)

    def memory_traffic(self, steps: int) -> JsonObject:
        """Return the bytes of memory-bound kernels per step, averaged over `steps` traced steps."""
        return {"bytes": round(self._open_simulation().accelerator.bytes_traced / steps)}

    @property
    def compilation(self) -> JsonObject | None:
        """Return the compiled graphs and their kernels; None if nothing was compiled."""
        front_end = sys.modules.get("fsdpbench.sim.torch_device.compile.front_end")
        return front_end.compile_report() if front_end is not None else None

    def _open_simulation(self) -> Simulation:
        if self._simulation is None:
            raise RuntimeError("the simulated device is used before open()")
        return self._simulation


class SimDevice(Tells):
    """A `Device` that runs rank 0; the other ranks exist only in the cost of collectives."""

    name = "sim"
    tracing_is_free = True

    def __init__(self, config: Config, placement: Placement) -> None:
        assert config.hardware is not None, "a simulated configuration names its hardware"
        self._what_if = config.what_if or WhatIf()
        super().__init__(config, _with_room(load_profile(config.hardware), self._what_if.room))
        self.torch_device = torch.device("sim", 0)
        self._placement = placement
        self._report_out_of_memory: Callable[[str], None] | None = None
        self._readings = AllocatorReadings()
        self._retried: list[bool] = []
        self._idle_at = -1
        self._work: dict[str, float] = {}
        self.line: Lines | None = None
        self._graph: GraphSession | None = None

    def open(self) -> None:
        self.start().init_process_group()

    def start(self) -> Simulation:
        """Start the device without a process group."""
        if self._config.settings.compile:
            from fsdpbench.sim.torch_device.compile import front_end  # importing it takes seconds

            front_end.install()
            front_end.lower_backwards_with_forwards()
        conf = self._what_if.allocator
        self._simulation = Simulation.start(
            self._profile,
            self._config.gpus,
            self._config.ranks_per_node,
            rank=self._placement.rank,
            allocator_conf=None if conf is None else AllocatorConf.parse(conf),
            jitter=self._config.jitter,
            sanitize=self._config.sanitize,
            software=self._software,
            attention=self._config.settings.attention,
            of_models=replacements.MECHANISMS,
        )
        self._simulation.accelerator.on_out_of_memory = self._report_out_of_memory
        if self._what_if.account:
            self._account = Account(
                self._simulation.accelerator, lambda: None if self.line is None else self.line()
            )
            self._account.begin()
        return self._simulation

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._simulation is not None:
            self._simulation.end()

    def trainer(self, model: torch.nn.Module) -> Callable[[], AbstractContextManager[object]]:
        """Return a context manager for each microbatch of `model`: the work of the profile's trainer."""
        return Trainer(self._software.trainer, model, self._open_simulation().accelerator.timeline).microbatch

    def capture(self, loop: TrainingLoop) -> None:
        if self._config.settings.cpu_offload and not self._config.sanitize:
            loop.around_update = HostShapes
        if self._config.settings.graph == "step":
            self._graph = GraphSession(self._open_simulation().accelerator, self._config.settings.grad_accum)
            loop.batches, loop.on_loss = self._graph.feed(loop.batches), _forget

    @property
    def graph(self) -> JsonObject | None:
        """Return the captured step; None if capture is off."""
        return None if self._graph is None else self._graph.to_dict()

    def settle(self) -> None:
        # Wrapping leaves reference cycles that hold memory: collect them, then disable automatic collection.
        gc.collect()
        gc.freeze()
        gc.disable()
        self.take_memory()

    def timed_step(self, step: Callable[[], object]) -> float:
        simulation = self._open_simulation()
        if simulation.cpu_ns() != self._idle_at:  # otherwise the wait would lengthen the traced step
            simulation.drain()
        start, retries = simulation.cpu_ns(), _retries()
        simulation.accelerator.python.begin_step()
        simulation.take_launched()
        if self._graph is None:
            step()
        else:
            self._graph.run(step)
        simulation.accelerator.python.end_step()
        simulation.drain()
        self._idle_at, self._work = simulation.cpu_ns(), simulation.take_launched()
        self._retried.append(_retries() > retries)
        return (self._idle_at - start) / 1e9

    def step_work(self, step: Callable[[], object]) -> dict[str, float]:
        """Return `RankRecord.step_work`. If copies to the host take time, also run a step with a slow host
        link. If `what_if.room` changes the memory, the step is not compared with others, so skip that."""
        work, as_it_is = self._work, self._graph is None and self._what_if.room == 1
        if as_it_is and self._open_simulation().slow_host_link(work):
            work["slow_link_step"] = self.timed_step(step)
        return work

    def has_settled(self, times_s: Sequence[float]) -> bool:
        """Return whether steps repeat: the graph is replayed, and no allocator retries, or stable times."""
        if self._graph is not None and not self._graph.replayed:
            return False
        return not any(self._retried[-WINDOW:]) or is_stable(times_s)

    def take_memory(self) -> StepMemory:
        module = torch.get_device_module("sim")
        taken = self._readings.since_last(module.memory_stats())
        module.reset_peak_memory_stats()
        return taken

    @contextmanager
    def trace(self, path: Path) -> Iterator[Tracer]:
        simulation = self._open_simulation()
        with simulation.trace(path) as tracer:
            self._idle_at = simulation.cpu_ns()
            yield tracer

    def loss_value(self, loss: torch.Tensor) -> float | None:
        return None

    def on_out_of_memory(self, report: Callable[[str], None]) -> None:
        self._report_out_of_memory = report

    def peak_flops(self, compute_type: str) -> float | None:
        return (self._profile.narrow_peak_flops | self._profile.peak_flops).get(compute_type)


def _forget(loss: torch.Tensor) -> None:
    """Drop the loss, which has no value here. Holding it would change the next step's addresses."""


def _with_room(profile: HardwareProfile, room: float) -> HardwareProfile:
    """Return the profile of the same GPU and its host with `room` times the memory."""
    if room == 1.0:
        return profile
    capacity = min(room * profile.memory.capacity_gib, KEYS["memory.capacity_gib"].most)
    host = replace(profile.host_link, memory_gb=room * profile.host_link.memory_gb)
    return replace(profile, memory=replace(profile.memory, capacity_gib=capacity), host_link=host)


def _retries() -> int:
    retries: int = torch.get_device_module("sim").memory_stats()["num_alloc_retries"]
    return retries


class Trainer:
    """The work of a trainer around each microbatch of `model`, defined by `software`, added to `timeline`.

    Composer's, from the sources of Composer (`mosaicml`) 0.14.1 and 0.17.0. `_train_microbatch`
    (`trainer.py`) keeps the outputs, logits included, as `state.outputs` until the next microbatch's forward
    has returned. After each backward `_eval_train_metrics` updates two metrics (`metrics/nlp.py`), each a
    cross entropy of the logits: log-probabilities in their dtype, then autocast's fp32 copy for `nll_loss`.
        forward, loss ── backward ── metric ── metric ── forward, loss ── ...
               └ logits of this microbatch ...................^ released
    """

    def __init__(self, software: TrainerSoftware, model: nn.Module, timeline: Timeline) -> None:
        self._timeline = timeline
        self._software = software
        self._outputs: Tensor | None = None
        if software.keeps_outputs:
            gpt = next(module for module in model.modules() if isinstance(module, GPT))
            gpt.lm_head.register_forward_hook(self._keep)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Wrap one microbatch: update the metrics after it and add the host time."""
        yield
        if self._software.metrics:
            self.update_metrics()
        if self._software.host_us:
            self._timeline.cpu += round(self._software.host_us * 1000)

    @torch.no_grad()
    def update_metrics(self) -> None:
        """Update the metrics. Raises `RuntimeError` before the first microbatch."""
        if self._outputs is None:
            raise RuntimeError("metrics of a microbatch that had no forward")
        rows = self._outputs.flatten(0, -2)
        targets = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for _ in range(self._software.metrics):
            with torch.autocast(rows.device.type, torch.bfloat16):
                F.cross_entropy(rows, targets, reduction="sum")

    def _keep(self, head: nn.Module, inputs: Any, logits: Tensor) -> None:
        self._outputs = logits
