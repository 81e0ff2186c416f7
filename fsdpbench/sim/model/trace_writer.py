"""Writer of Kineto JSON, which formats recorded events directly into text.

The fields are those that torch.profiler writes on a CUDA machine. Process 0 is the GPU, with one thread per
stream; the host process has one thread.
"""

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.writing import create, replacing
from fsdpbench.sim.model.profile import HardwareProfile

HOST_PID = 1000
GPU_PID = 0
_ON_HOST = f'"pid":{HOST_PID},"tid":{HOST_PID}'
_GZIP_LEVEL = 1
_DECIMALS = [f".{thousandths:03d}" for thousandths in range(1000)]
"""Many times are written; looking up the decimals takes half as long as formatting them."""
_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime")
"""Indexed by `HostKind`."""
NAMES = table_beside(__file__, "trace_names.toml")
_CALLBACK_IDS = NAMES["callback_ids"]


@dataclass(frozen=True)
class TraceHeader:
    """The rank and machine of a trace."""

    rank: int
    world_size: int
    profile: HardwareProfile
    process_groups: tuple[Mapping[str, Any], ...]
    gpus_per_node: int


def write_trace(
    path: Path,
    header: TraceHeader,
    host: "Sequence[HostEvent]",
    device: "Sequence[DeviceEvent]",
    syncs: "Sequence[CudaSync]",
    memory: "Sequence[MemoryEvent]",
    instants: "Sequence[InstantEvent]",
) -> None:
    """Write the trace to `path` atomically; the content depends only on the arguments."""
    lines = _metadata(host, device, syncs)
    launched = {event[5]: event for event in device}
    host_lines, external_ids, stream_spans = _host_events(host, launched)
    lines += host_lines
    lines += _device_events(device, external_ids)
    lines += stream_spans
    lines += _sync_events(syncs, external_ids)
    lines += _memory_events(memory)
    lines += [_instant(name, time_ns, args) for name, time_ns, args in instants]
    lines[0] = _head(header, path.name) + lines[0]
    lines[-1] += "\n]\n}\n"
    text = ",\n".join(lines)
    with replacing(path) as temporary, create(temporary) as raw:
        # The gzip header has no file name and no time: equal events give equal bytes.
        with gzip.GzipFile("", "wb", compresslevel=_GZIP_LEVEL, fileobj=raw, mtime=0) as packed:
            packed.write(text.encode())


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _us(ns: int) -> str:
    """Format nanoseconds as microseconds with three exact decimals."""
    return f"{ns // 1000}{_DECIMALS[ns % 1000]}"


def _head(header: TraceHeader, name: str) -> str:
    profile = header.profile
    everyone = {
        "pg_name": "0",
        "pg_desc": "default_pg",
        "backend_config": "cuda:nccl",
        "pg_size": header.world_size,
    }
    groups = [dict(group) for group in header.process_groups] or [everyone]
    device = {
        "id": 0,
        "name": profile.title,
        "totalGlobalMem": profile.memory_bytes,
        "numSms": profile.sm_count,
    }
    label = {
        "device": "sim",
        "simulated": True,
        "hardware": {
            "name": profile.name,
            "source": profile.source,
            "links": _links(header),
            "peak_flops": profile.narrow_peak_flops | profile.peak_flops,
            "memory_bytes_per_s": profile.memory_bandwidth,
        },
    }
    # HTA finds the rank by a pattern that requires a space after the colon.
    distributed = (
        f'{{"backend": "nccl", "rank": {header.rank}, "world_size": {header.world_size}, '
        f'"pg_count": {len(groups)}, "pg_config": {_json(groups)}}}'
    )
    return (
        f'{{\n"schemaVersion": 1,\n"fsdpbench": {_json(label)},\n"deviceProperties": [{_json(device)}],\n'
        f'"distributedInfo": {distributed},\n"record_shapes": 1,\n"profile_memory": 1,\n'
        f'"displayTimeUnit": "ms",\n"baseTimeNanoseconds": 0,\n"traceName": {_json(name)},\n'
        f'"traceEvents": [\n'
    )


def _links(header: TraceHeader) -> dict[str, float]:
    """Return the peak bandwidths of links for readers of the trace."""
    profile, per_node = header.profile, header.gpus_per_node
    rails = min(per_node, profile.gpus_per_node) / profile.gpus_per_node
    return {
        "gpus_per_node": per_node,
        "inside_node_bytes_per_s": profile.link_gb_s * 1e9,
        "between_nodes_bytes_per_s": profile.nic.gb_s_per_node * 1e9 * rails,
    }


def _metadata(
    host: "Sequence[HostEvent]", device: "Sequence[DeviceEvent]", syncs: "Sequence[CudaSync]"
) -> list[str]:
    """Return metadata events: names and order of processes and threads."""
    streams = sorted({event[2] for event in device} | {sync[1] for sync in syncs if sync[1] >= 0})
    start = _us(min((event[0] for event in host), default=0))

    def line(kind: str, pid: int, tid: int, args: Mapping[str, Any]) -> str:
        """Return a metadata event of this kind, with `args` as JSON."""
        return f'{{"ph":"M","name":"{kind}","ts":{start},"pid":{pid},"tid":{tid},"args":{_json(args)}}}'

    lines = []
    for pid, label, order in ((HOST_PID, "CPU", HOST_PID), (GPU_PID, "GPU 0", 5_000_000)):
        lines.append(line("process_name", pid, 0, {"name": "python"}))
        lines.append(line("process_labels", pid, 0, {"labels": label}))
        lines.append(line("process_sort_index", pid, 0, {"sort_index": order}))
    lines.append(line("thread_name", HOST_PID, HOST_PID, {"name": f"thread {HOST_PID} (python)"}))
    lines.append(line("thread_sort_index", HOST_PID, HOST_PID, {"sort_index": HOST_PID}))
    for stream in streams:
        lines.append(line("thread_name", GPU_PID, stream, {"name": f"stream {stream} "}))
        lines.append(line("thread_sort_index", GPU_PID, stream, {"sort_index": stream}))
    return lines


def _host_events(
    host: "Sequence[HostEvent]", launched: "Mapping[int, DeviceEvent]"
) -> tuple[list[str], dict[int, int], list[str]]:
    """Return lines of the CPU thread, external ids by correlation, and lines of annotations on streams."""
    lines: list[str] = []
    stream_lines: list[str] = []
    external_ids: dict[int, int] = {}
    beginnings: list[dict[str, str]] = [{} for _ in HostKind]
    # Open spans: (end, external id, spans by stream or None, name).
    stack: list[tuple[int, int, dict[int, list[int]] | None, str]] = []
    serial = 0
    decimals = _DECIMALS
    runtime, is_span = HostKind.RUNTIME, HostKind.ANNOTATION  # looking up enum members is slow
    for start, negative_end, _, kind, name, correlation, inputs in sorted(host):
        end = -negative_end
        while stack and stack[-1][0] <= start:
            _close(stack.pop(), stream_lines)
        beginning = beginnings[kind].get(name)
        if beginning is None:
            beginning = f'{{"ph":"X","cat":"{_CATEGORIES[kind]}","name":{_json(name)},{_ON_HOST},"ts":'
            beginnings[kind][name] = beginning
        begin, span = f"{start // 1000}{decimals[start % 1000]}", end - start  # `_us`, inlined
        if kind is runtime:
            external = stack[-1][1] if stack else 0
            external_ids[correlation] = external
            args = f'"External id":{external},"cbid":{_CALLBACK_IDS.get(name, 0)},"correlation":{correlation}'
            event = launched.get(correlation)
            if event is not None:
                lines.append(
                    f'{{"ph":"s","id":{correlation},{_ON_HOST},"ts":{begin},"cat":"ac2g","name":"ac2g"}}'
                )
                _extend_spans(stack, event)
        else:
            serial += 1
            args = f'"External id":{serial}'
            if inputs:
                args += "," + inputs
            spans: dict[int, list[int]] | None = {} if kind is is_span else None
            stack.append((end, serial, spans, name))
        lines.append(f'{beginning}{begin},"dur":{span // 1000}{decimals[span % 1000]},"args":{{{args}}}}}')
    while stack:
        _close(stack.pop(), stream_lines)
    return lines, external_ids, stream_lines


def _extend_spans(
    stack: Sequence[tuple[int, int, dict[int, list[int]] | None, str]], event: "DeviceEvent"
) -> None:
    """Extend each annotation that is open at a kernel's launch to include the kernel."""
    _, _, stream, start, end, _, _ = event
    for _, _, spans, _ in stack:
        if spans is None:
            continue
        span = spans.get(stream)
        if span is None:
            spans[stream] = [start, end]
        else:
            span[0] = min(span[0], start)
            span[1] = max(span[1], end)


def _close(entry: tuple[int, int, dict[int, list[int]] | None, str], lines: list[str]) -> None:
    _, external, spans, name = entry
    for stream, (start, end) in (spans or {}).items():
        lines.append(
            f'{{"ph":"X","cat":"gpu_user_annotation","name":{_json(name)},"pid":{GPU_PID},"tid":{stream},'
            f'"ts":{_us(start)},"dur":{_us(end - start)},"args":{{"External id":{external}}}}}'
        )


def _device_events(device: "Sequence[DeviceEvent]", external_ids: Mapping[int, int]) -> list[str]:
    """Return lines of kernels, copies and fills, each with the end of its flow arrow."""
    lines = []
    names: dict[str, str] = {}
    for category, name, stream, start, end, correlation, further in device:
        quoted = names.get(name)
        if quoted is None:
            quoted = names[name] = _json(name)
        begin = _us(start)
        args = (
            f'"External id":{external_ids.get(correlation, 0)},"queued":0,"device":0,"context":1,'
            f'"stream":{stream},"correlation":{correlation}'
        )
        if further:
            args += "," + _json(further)[1:-1]
        lines.append(
            f'{{"ph":"X","cat":"{category}","name":{quoted},"pid":{GPU_PID},"tid":{stream},'
            f'"ts":{begin},"dur":{_us(end - start)},"args":{{{args}}}}}'
        )
        lines.append(
            f'{{"ph":"f","id":{correlation},"pid":{GPU_PID},"tid":{stream},"ts":{begin},'
            f'"cat":"ac2g","name":"ac2g","bp":"e"}}'
        )
    return lines


def _sync_events(syncs: "Sequence[CudaSync]", external_ids: Mapping[int, int]) -> list[str]:
    """Return lines of synchronizations in CUPTI's form."""
    lines = []
    for name, stream, start, end, correlation, event_id, record_stream, record_correlation in syncs:
        waits = ""
        if record_correlation is not None:
            waits = (
                f'"wait_on_stream":{record_stream},"wait_on_cuda_event_record_corr_id":{record_correlation},'
                f'"wait_on_cuda_event_id":{event_id},'
            )
        lines.append(
            f'{{"ph":"X","cat":"cuda_sync","name":"{name}","pid":{GPU_PID},"tid":{stream},"ts":{_us(start)},'
            f'"dur":{_us(end - start)},"args":{{"External id":{external_ids.get(correlation, 0)},'
            f'"cuda_sync_kind":"{name}",{waits}"stream":{stream},"correlation":{correlation},'
            f'"device":0,"context":1}}}}'
        )
    return lines


def _memory_events(memory: "Sequence[MemoryEvent]") -> list[str]:
    return [
        f'{{"ph":"i","cat":"cpu_instant_event","s":"t","name":"[memory]",{_ON_HOST},'
        f'"ts":{time_ns // 1000}{_DECIMALS[time_ns % 1000]},"args":{{"Total Reserved":{reserved},'
        f'"Total Allocated":{allocated},{_active(active)}"Bytes":{nbytes},"Addr":{address},'
        f'"Device Id":0,"Device Type":1}}}}'
        for time_ns, address, nbytes, allocated, active, reserved in memory
    ]


def _active(active: int) -> str:
    return f'"Total Active":{active},' if active >= 0 else ""


def _instant(name: str, time_ns: int, args: Mapping[str, Any]) -> str:
    return (
        f'{{"ph":"i","cat":"cpu_instant_event","s":"t","name":{_json(name)},{_ON_HOST},'
        f'"ts":{_us(time_ns)},"args":{_json(args)}}}'
    )


class HostKind(IntEnum):
    """Kinds of spans on the CPU thread."""

    OPERATOR = 0
    ANNOTATION = 1
    RUNTIME = 2


# (start ns, -end ns, -serial, kind, name, correlation or 0, inputs as JSON members). Sorting puts outer spans
# before inner ones: earlier start, then later end, then recorded later (a span is recorded when it ends).
HostEvent = tuple[int, int, int, HostKind, str, int, str]

# (category, name, stream, start ns, end ns, correlation, further arguments)
DeviceEvent = tuple[str, str, int, int, int, int, Mapping[str, Any] | None]

# (name, stream or -1, start ns, end ns, correlation, event id, stream of the record, correlation of the
# record)
CudaSync = tuple[str, int, int, int, int, int | None, int | None, int | None]

# (time ns, address, signed bytes, total allocated, total active or -1, total reserved)
MemoryEvent = tuple[int, int, int, int, int, int]

# (name, time ns, arguments)
InstantEvent = tuple[str, int, Mapping[str, Any]]
