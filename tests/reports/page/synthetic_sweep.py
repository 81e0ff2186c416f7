"""A run folder as a sweep leaves it, small and made up, for the tests of the page.

The step times follow from a toy schedule (all-gather before each block, reduce-scatter after it, on their own
streams), and the traces hold that very schedule, so that the page's charts have something true to show.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
BLOCKS = 12
HARDWARE = {
    "name": "a100-80gb",
    "source": "NVIDIA A100 datasheet",
    "memory_bytes": 80 * GIB,
    "simulated": True,
}
_COMPUTE_STREAM, _GATHER_STREAM, _REDUCE_STREAM = 7, 20, 24


@dataclass
class Schedule:
    """One simulated step after another: a clock for the CPU and one for each stream, events as Kineto writes
    them.
    """

    prefetch: str
    block_us: float
    gather_us: float
    blocks: int = BLOCKS
    events: list[dict[str, Any]] = field(default_factory=list)
    cpu: float = 1000.0
    streams: dict[int, float] = field(default_factory=dict)
    correlation: int = 0
    live: int = 30 * GIB
    retries: int = 0

    def annotate(self, name: str, start: float) -> None:
        self._event("user_annotation", name, start, self.cpu - start, tid=1, args={})

    def launch(self, name: str, stream: int, duration: float, after: float = 0.0, **extra: Any) -> float:
        """A runtime call now and its kernel when stream and `after` allow; returns the kernel's end."""
        self.correlation += 1
        self._event(
            "cpu_op",
            f"aten::{name.split('_')[0]}",
            self.cpu,
            5.0,
            tid=1,
            args={"External id": self.correlation},
        )
        args = {"correlation": self.correlation, "External id": self.correlation}
        self._event("cuda_runtime", "cudaLaunchKernel", self.cpu + 1, 3.0, tid=1, args=args)
        duration = float(round(duration))
        start = float(round(max(self.cpu + 4, self.streams.get(stream, 0.0), after)))
        args |= {"stream": stream, "device": 0, **extra}
        self._event("kernel", name, start, duration, pid=0, tid=stream, args=args)
        self.streams[stream] = start + duration
        self.cpu += 6
        return start + duration

    def collective(self, kind: str, unit: str, stream: int, duration: float, after: float = 0.0) -> float:
        names = {
            "all_gather": "ncclDevKernel_AllGather_RING_LL(x)",
            "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)",
        }
        start = self.cpu
        extra = {"Collective name": f"_{kind}_base", "In msg nelems": 10**6, "Out msg nelems": 8 * 10**6}
        extra |= {"Group size": 8, "dtype": "BFloat16", "Process Group Name": "0"}
        end = self.launch(names[kind], stream, duration, after, **extra)
        self.annotate(f"FSDP::{kind} ({unit})", start)
        return end

    def memory(self, change: int) -> None:
        self.live += change
        args = {"Device Type": 1, "Device Id": 0, "Addr": 4096, "Bytes": change, "Total Allocated": self.live}
        args["Total Reserved"] = max(self.live + GIB, 40 * GIB)
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "ts": self.cpu,
                "pid": 1,
                "tid": 1,
                "s": "t",
                "args": args,
            }
        )

    def retry(self) -> None:
        self.retries += 1
        args = {"Bytes": GIB, "Freed": 3 * GIB}
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[alloc_retry]",
                "ts": self.cpu,
                "pid": 1,
                "tid": 1,
                "s": "t",
                "args": args,
            }
        )

    def _event(
        self, cat: str, name: str, ts: float, dur: float, *, tid: int, args: dict[str, Any], pid: int = 1
    ) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "args": args}
        self.events.append(event | {"ts": round(ts, 3), "dur": round(dur, 3)})


def run_step(schedule: Schedule, number: int, *, retry: bool) -> None:
    """Forward and backward over the blocks, then an optimizer kernel; the CPU waits for all of it at the
    end.
    """
    begin = schedule.cpu
    _forward(schedule)
    _backward(schedule, retry=retry)
    start = schedule.cpu
    schedule.launch("multi_tensor_apply_kernel", _COMPUTE_STREAM, 3000.0, schedule.streams[_REDUCE_STREAM])
    schedule.annotate("optimizer", start)
    schedule.cpu = max(schedule.cpu, *schedule.streams.values())
    schedule.annotate(f"ProfilerStep#{number}", begin)


def _forward(schedule: Schedule) -> None:
    start = schedule.cpu
    for block in range(schedule.blocks):
        gathered = schedule.collective("all_gather", f"blocks.{block}", _GATHER_STREAM, schedule.gather_us)
        schedule.memory(2 * GIB)
        for kernel in (
            "layer_norm_kernel",
            "ampere_bf16_gemm_qkv",
            "flash_fwd_kernel",
            "ampere_bf16_gemm_mlp",
        ):
            schedule.launch(kernel, _COMPUTE_STREAM, schedule.block_us / 4, gathered)
        schedule.memory(-GIB)
    schedule.annotate("forward", start)


def _backward(schedule: Schedule, *, retry: bool) -> None:
    start, computed = schedule.cpu, 0.0
    for block in reversed(range(schedule.blocks)):
        after = 0.0 if schedule.prefetch == "pre" else computed
        gathered = schedule.collective(
            "all_gather", f"blocks.{block}", _GATHER_STREAM, schedule.gather_us, after
        )
        for kernel in ("flash_bwd_kernel", "ampere_bf16_gemm_dgrad", "ampere_bf16_gemm_wgrad"):
            computed = schedule.launch(kernel, _COMPUTE_STREAM, schedule.block_us * 2 / 3, gathered)
        if retry and block == schedule.blocks // 2:
            schedule.retry()
        schedule.memory(GIB // 2)
        schedule.collective(
            "reduce_scatter", f"blocks.{block}", _REDUCE_STREAM, schedule.gather_us * 1.5, computed
        )
        schedule.memory(-GIB - GIB // 2)
    schedule.annotate("backward", start)


def write_trace(path: Path, schedule: Schedule) -> None:
    """Two steps of the schedule as a Kineto file."""
    content = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 80 * GIB}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "fsdpbench": {"device": "sim", "simulated": True, "hardware": HARDWARE},
        "traceEvents": schedule.events,
        "traceName": path.name,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))


def space() -> Iterator[dict[str, Any]]:
    """The settings of every point: FSDP1 has a rate limiter, FSDP2 has none."""
    for wrap, prefetch, dtype in itertools.product(
        ("block", "every-2", "root"), ("pre", "none"), ("bf16", "fp32")
    ):
        for limit in (2, "off"):
            yield _settings("impl-fsdp1", wrap, prefetch, dtype, limit)
        if prefetch == "pre":
            yield _settings("impl-fsdp2", wrap, prefetch, dtype, None)


def _settings(system: str, wrap: str, prefetch: str, dtype: str, limit: Any) -> dict[str, Any]:
    chosen = {"wrap": wrap, "backward_prefetch": prefetch, "param_dtype": dtype, "limit_all_gathers": limit}
    return {"system": system, "settings": {"batch": 8, "seq": None, "strategy": "FULL_SHARD", **chosen}}


def write_point(
    run: Path,
    point: dict[str, Any],
    number: int,
    *,
    trace: bool = True,
    blocks: int = BLOCKS,
) -> Path:
    """One configuration's folder, with figures that follow from its schedule."""
    settings = point["settings"]
    values = (settings[name] for name in ("wrap", "backward_prefetch", "param_dtype", "limit_all_gathers"))
    name = "-".join([point["system"], *(str(value) for value in values if value is not None)])
    folder = run / f"{name.replace('/', '_')[:80]}-{number:08x}"
    folder.mkdir(parents=True)
    slow = 2.4 if settings["param_dtype"] == "fp32" else 1.0
    exposed = {"block": 1.0, "every-2": 1.3, "root": 6.0}[settings["wrap"]]
    schedule = Schedule(settings["backward_prefetch"], 4000.0 * slow, 900.0 * slow * exposed, blocks)
    retried = settings["limit_all_gathers"] == "off" and settings["param_dtype"] == "bf16"
    for step in (3, 4):
        run_step(schedule, step, retry=retried)
    config = {
        "schema": 1,
        "name": name,
        "key": f"{number:08x}" + "0" * 56,
        "model": "gpt-2.8b",
        "shape": {"layers": 32},
    }
    config |= {
        "system": point["system"],
        "device": "sim",
        "hardware": "a100-80gb",
        "gpus": 8,
        "gpus_per_node": 8,
    }
    config |= {
        "settings": settings,
        "command": f"fsdpbench run --model gpt-2.8b --system {point['system']} --gpus 8",
    }
    (folder / "config.json").write_text(json.dumps(config))
    out_of_memory = settings["wrap"] == "root" and settings["param_dtype"] == "fp32"
    result = failed_result() if out_of_memory else figures(schedule, retried, settings)
    (folder / "result.json").write_text(json.dumps(result))
    for log in ("stdout.log", "stderr.log"):
        (folder / log).write_text("")
    if trace and not out_of_memory:
        write_trace(folder / "trace" / "rank0_trace.json.gz", schedule)
    return folder


def figures(schedule: Schedule, retried: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """A `result.json` for a configuration that finished; the times are the trace's."""
    kernels = [event for event in schedule.events if event.get("cat") == "kernel"]
    step = (max(e["ts"] + e["dur"] for e in kernels) - 1000.0) / 2e6
    compute = _covered(e for e in kernels if "nccl" not in e["name"])
    collective = _covered(e for e in kernels if "nccl" in e["name"])
    either = _covered(kernels)
    exposed, hidden = either - compute, collective + compute - either
    reserved = (
        52 + 9 * retried + 6 * (settings["param_dtype"] == "fp32") + 4 * (settings["wrap"] == "root")
    ) * GIB
    tokens = 8 * 2048 / step
    return {
        "schema": 1,
        "device": "sim",
        "hardware": HARDWARE,
        "environment": {"versions": {"torch": "2.13.0", "python": "3.11.9", "fsdpbench": "0.1.0"}},
        "status": "ok",
        "cause": None,
        "step_time_s": step,
        "samples_per_s_per_gpu": 8 / step,
        "tokens_per_s_per_gpu": tokens,
        "tflops_per_gpu": tokens * 17e9 / 1e12 / 10,
        "hardware_tflops_per_gpu": tokens * 17e9 / 1e12 / 10,
        "mfu": tokens * 17e9 / 1e12 / 10 / 312,
        "hfu": tokens * 17e9 / 1e12 / 10 / 312,
        "peak_memory_bytes": {
            "allocated": reserved - 9 * GIB,
            "active": reserved - 7 * GIB,
            "reserved": reserved,
        },
        "alloc_retries_per_step": 2 if retried else 0,
        "ooms": 0,
        "traced_step_time_s": step,
        "time_s": {
            "compute_only": compute - hidden,
            "overlapped": hidden,
            "exposed_communication": exposed,
            "idle": step - either,
        },
        "communication": {},
        "overlap_fraction": hidden / collective,
        "loss": None,
        "traces": ["trace/rank0_trace.json.gz"],
    }


def _covered(events: Iterable[dict[str, Any]]) -> float:
    """Seconds a step (of two) in which at least one of the events runs."""
    covered = reach = 0.0
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered / 2e6


def failed_result(
    status: str = "oom", message: str = "rank 0: out of memory: tried to allocate 11.2 GiB"
) -> dict[str, Any]:
    """A `result.json` of a configuration without figures."""
    cause = {"message": message, "log": "stderr.log"}
    return {
        "schema": 1,
        "device": "sim",
        "hardware": HARDWARE,
        "environment": {},
        "status": status,
        "cause": cause,
    }


def write_sweep(run: Path, *, traces: bool = True, limit: int | None = None) -> Path:
    """The whole sweep's folder."""
    run.mkdir(parents=True, exist_ok=True)
    folders = [
        write_point(run, point, number, trace=traces)
        for number, point in enumerate(itertools.islice(space(), limit))
    ]
    names = ", ".join(json.dumps(folder.name) for folder in folders)
    (run / "sweep.toml").write_text(f'schema = 1\nmodel = "gpt-2.8b"\npoints = [{names}]\n')
    return run
