"""Torch's own messages of its releases, read figure by figure."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis.out_of_memory import describe_report, read_oom_snapshot
from fsdpbench.reports.analysis.snapshots import Holder
from fsdpbench.reports.readers import TraceError
from fsdpbench.reports.readers.oom_log import find_messages, read_log

GIB, MIB = 1 << 30, 1 << 20

TORCH_2_0 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.75 "
    "GiB total capacity; "
    "14.25 GiB already allocated; 19.75 MiB free; 14.50 GiB reserved in total by PyTorch) If "
    "reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation."
)
TORCH_2_0_LIMITED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 15.75 GiB total capacity; 1.25 GiB "
    "already allocated; "
    "12.00 GiB free; 3.15 GiB allowed; 1.50 GiB reserved in total by PyTorch)"
)
TORCH_2_1 = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 79.25 GiB of "
    "which 1.25 GiB is free. "
    "Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated "
    "memory 66.25 GiB is "
    "allocated by PyTorch, and 9.25 GiB is reserved by PyTorch but unallocated."
)
OTHERS = (
    "CUDA out of memory. Tried to allocate 1024 bytes. GPU 3 has a total capacity of 23.50 GiB of "
    "which 5.00 MiB is free. "
    "Process 411 has 12.25 GiB memory in use. Process 77 has 1.25 GiB memory in use. Including "
    "non-PyTorch memory, this "
    "process has 10.00 GiB memory in use. 4.70 GiB allowed; Of the allocated memory 8.25 GiB is "
    "allocated by PyTorch, with "
    "1.50 GiB allocated in private pools (e.g., CUDA Graphs), and 512.00 KiB is reserved by "
    "PyTorch but unallocated."
)
XPU = (
    "XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.50 GiB. Of "
    "the allocated memory "
    "12.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated. "
    "Please use `empty_cache`"
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 8.50 GB, other allocations: 384.00 "
    "KB, max allowed: 9.00 GB). "
    "Tried to allocate 2.00 GB on private pool."
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "2.0": (
        TORCH_2_0,
        {
            "source": "CUDA",
            "asked": 20 * MIB,
            "gpu": 0,
            "total": int(15.75 * GIB),
            "free": int(19.75 * MIB),
            "allocated": int(14.25 * GIB),
            "reserved": int(14.5 * GIB),
            "short": MIB // 4,
        },
    ),
    "2.0, limited": (TORCH_2_0_LIMITED, {"gpu": 1, "allowed": round(3.15 * GIB), "short": 0}),
    "2.1": (
        TORCH_2_1,
        {
            "asked": 2 * GIB,
            "total": int(79.25 * GIB),
            "process": 78 * GIB,
            "allocated": int(66.25 * GIB),
            "unallocated": int(9.25 * GIB),
            "outside": int(2.5 * GIB),
        },
    ),
    "others": (
        OTHERS,
        {
            "asked": 1024,
            "gpu": 3,
            "others": int(13.5 * GIB),
            "others_seen": 2,
            "allowed": round(4.7 * GIB),
            "private_pools": int(1.5 * GIB),
            "unallocated": 512 << 10,
        },
    ),
    "HIP": (
        TORCH_2_1.replace("CUDA", "HIP").replace("capacty", "capacity"),
        {"source": "HIP", "free": int(1.25 * GIB)},
    ),
    "XPU": (XPU, {"source": "XPU", "asked": 4 * GIB, "free": None, "allocated": 12 * GIB, "outside": None}),
    "MPS": (MPS, {"source": "MPS", "asked": 2 * GIB, "reserved": int(8.5 * GIB), "outside": 384 << 10}),
    "CPU": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate "
        "memory: you tried to "
        "allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)",
        {"source": "CPU", "asked": 4_000_000_000, "free": None},
    ),
    "driver": (
        "RuntimeError: CUDA error: out of memory",
        {"source": "driver", "asked": None, "reserved": None},
    ),
    "NCCL": ("ncclUnhandledCudaError: Cuda failure 2 'out of memory'", {"source": "driver"}),
    "1.3": (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 11.17 GiB total capacity; "
        "10.66 GiB already allocated; 2.31 MiB free; 125.22 MiB cached)",
        {"gpu": 0, "unallocated": round(125.22 * MIB), "free": round(2.31 * MIB), "short": 0},
    ),
    "expandable segments": ("RuntimeError: CUDA driver error: out of memory", {"source": "driver"}),
    "HIP driver": ("torch.AcceleratorError: HIP error: out of memory", {"source": "driver"}),
    "RCCL": ("host:1:2 [0] RCCL WARN HIP failure: 'out of memory'", {"source": "driver"}),
    "NCCL asks": (
        "misc/alloc.h:37 NCCL WARN Failed to CUDA calloc async 4194304 bytes",
        {"source": "driver", "asked": 4194304},
    ),
    "cuDNN": ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", {"source": "driver"}),
    "Triton": ("RuntimeError: Triton Error [CUDA]: out of memory", {"source": "driver"}),
    "mmap": (
        "RuntimeError: unable to mmap 2048 bytes from file </w/model.bin>: Cannot allocate memory (12)",
        {"source": "CPU", "asked": 2048},
    ),
    "Slurm": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks were ended",
        {"source": "killed", "asked": None},
    ),
    "kernel": ("[12.3] Out of memory: Killed process 77 (python) anon-rss:64000kB", {"source": "killed"}),
    "loader": (
        "RuntimeError: DataLoader worker (pid(s) 77) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        {"source": "shm"},
    ),
    "NCCL's shared memory": (
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Xf3a (size 9637888)",
        {"source": "shm", "asked": 9637888},
    ),
    "exabyte": (
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
        {"source": "CUDA", "asked": None},
    ),
}


@pytest.mark.parametrize(("text", "figures"), CASES.values(), ids=list(CASES))
def test_every_form_of_the_message_is_read(text: str, figures: dict[str, Any]) -> None:
    (message,) = find_messages(text)
    said = message.to_dict()
    assert {name: said[name] for name in figures} == figures


def test_a_message_that_a_terminal_folded_is_read() -> None:
    folded = TORCH_2_1.replace("capacty of ", "capacty of\n    ").replace(" GiB is free", "\nGiB is free")
    report = read_log(folded)
    assert report is not None
    assert report.message.to_dict() == find_messages(TORCH_2_1)[0].to_dict()


def test_the_simulated_allocators_own_message_is_read() -> None:
    from fsdpbench.sim.model.allocator.caching import out_of_memory

    text = out_of_memory(
        asked=GIB, total=8 * GIB, free=GIB // 2, outside=GIB, allocated=6 * GIB, reserved=13 * GIB // 2
    )
    said = find_messages(text)[0].to_dict()
    assert (said["asked"], said["reserved"], said["outside"], said["short"]) == (
        GIB,
        13 * GIB // 2,
        GIB,
        GIB // 2,
    )


LOG = f"""
[rank0]: Traceback (most recent call last):
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/u/train.py", line 88, in <module>
[rank0]:   File "/home/u/train.py", line 70, in <module>
[rank3]:     loss.backward()
[rank3]:   File "/v/lib/python3.11/site-packages/torch/_tensor.py", line 521, in backward
[rank3]:   File "/v/lib/python3.11/site-packages/torch/autograd/__init__.py", line 289, in backward
[rank3]: torch.OutOfMemoryError: {TORCH_2_1}
"""


def test_a_log_tells_rank_phase_and_line() -> None:
    report = read_log(LOG)
    assert report is not None
    assert (report.ranks, report.phase, str(report.where)) == (
        (3,),
        "backward",
        "/home/u/train.py:88 in <module>",
    )


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (["torch/optim/adamw.py", "torch/optim/adamw.py"], "optimizer"),
        (["model.py", "torch/nn/modules/linear.py"], "forward"),
        (["torch/_tensor.py", "torch/utils/checkpoint.py", "torch/nn/modules/linear.py"], "backward"),
    ],
)
def test_the_phase_is_that_of_the_traceback(frames: list[str], phase: str) -> None:
    lines = "\n".join(f'  File "/v/site-packages/{name}", line 3, in call' for name in frames)
    report = read_log(f"Traceback (most recent call last):\n{lines}\n{TORCH_2_1}")
    assert report is not None
    assert report.phase == phase


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TORCH_2_1, "expandable_segments:True"),
        (
            TORCH_2_0,
            "the request may fit, with little to spare: set PYTORCH_CUDA_ALLOC_CONF=max_split",
        ),
        (TORCH_2_0_LIMITED, "set_per_process_memory_fraction"),
        (OTHERS, "2 others hold 13.50 GiB"),
        (
            TORCH_2_1.replace("9.25 GiB is reserved", "0.25 GiB is reserved"),
            "the program itself must hold less",
        ),
    ],
    ids=["fragmented", "nearly", "limited", "others", "full"],
)
def test_the_arithmetic_names_the_cause(text: str, words: str) -> None:
    report = read_log(text)
    assert report is not None
    said = describe_report(report)
    assert words in said
    assert "unknown" in said, "what a message does not tell is said to be unknown"


def test_other_texts_hold_none() -> None:
    assert read_log("ran out of patience; memory is fine\nKilled") is None
    assert read_log("OutOfResources: out of resource: shared memory, Required: 270336") is None


@pytest.mark.parametrize(
    ("name", "word"), [("Slurm", "--mem"), ("loader", "--shm-size"), ("HIP driver", "NCCL")]
)
def test_what_was_not_the_gpus_allocator_gets_other_advice(name: str, word: str) -> None:
    report = read_log(CASES[name][0])
    assert report is not None
    assert word in describe_report(report)


def _snapshot() -> dict[str, Any]:
    def frames(*names: str) -> list[dict[str, Any]]:
        return [{"filename": name.split(":")[0], "line": 7, "name": name.split(":")[1]} for name in names]

    history = [
        {"action": "alloc", "addr": 1, "size": 100, "frames": frames("/u/model.py:forward")},
        {
            "action": "alloc",
            "addr": 2,
            "size": 40,
            "frames": frames("/s/torch/optim/adamw.py:step", "/u/train.py:main"),
        },
        {
            "action": "alloc",
            "addr": 3,
            "size": 30,
            "frames": frames("/s/fsdp.py:foreach_all_gather", "/u/train.py:main"),
        },
        {"action": "alloc", "addr": 4, "size": 20, "frames": frames("/s/torch/nn/modules/linear.py:forward")},
        {"action": "free_requested", "addr": 4, "size": 20, "frames": []},
        {"action": "oom", "addr": 5, "size": 64, "device_free": 11, "frames": frames("/u/model.py:forward")},
    ]
    blocks = [{"size": size, "state": "active_allocated"} for size in (100, 40, 30, 25)]
    blocks.append({"size": 61, "state": "inactive"})
    segment = {"device": 0, "allocated_size": 195, "active_size": 195, "total_size": 256, "blocks": blocks}
    return {"segments": [segment], "device_traces": [history]}


def test_a_snapshot_tells_who_held_memory_at_the_error(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps(_snapshot()))
    (found,) = read_oom_snapshot(path)
    assert (found.asked, found.free, found.phase, found.split) == (64, 11, "forward", 61)
    assert sorted(found.held.values()) == [25, 30, 40, 100]
    assert sum(found.held.values()) == found.allocated == 195
    assert found.lines[0] == Holder("/u/model.py:7 forward", 100, 1)


def test_a_snapshot_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "run").touch, ())

    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "x": Evil()}))
    with pytest.raises(TraceError):
        read_oom_snapshot(path)
    assert not (tmp_path / "run").exists()


IN_A_CONTAINER = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.20 GiB is free. Process 12345 has 77.95 GiB memory in use. Of the allocated memory "
    "70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)


def test_a_process_that_the_driver_knows_by_another_number_is_this_one() -> None:
    said = find_messages(IN_A_CONTAINER)[0].to_dict()
    assert (said["process"], said["others"], said["others_seen"]) == (round(77.95 * GIB), None, 0)
    assert said["outside"] == round(77.95 * GIB) - 75 * GIB
    beside = find_messages(IN_A_CONTAINER.replace("77.95", "2.95"))[0].to_dict()
    assert (beside["process"], beside["others"]) == (None, round(2.95 * GIB))


def test_a_message_folded_by_a_launcher_that_marks_lines_is_read() -> None:
    folded = "[rank0]: " + TORCH_2_1.replace("of which ", "of which\n[rank0]: ")
    report = read_log(folded)
    assert report is not None
    assert report.message.to_dict() == find_messages(TORCH_2_1)[0].to_dict()


@pytest.mark.parametrize(
    "phrase",
    [
        "worker (pid",
        "unable to mmap 1 bytes from file <",
        "creating shared memory segment nccl",
        "nccl",
        "\n",
        "1",
    ],
)
def test_a_repeated_phrase_costs_no_more_than_its_length(phrase: str) -> None:
    began = time.process_time()
    read_log(("creating shared memory segment " + phrase * 400_000)[:400_000])
    assert time.process_time() - began < 4.0  # a tenth of a second; quadratic half a minute


@pytest.mark.parametrize("digits", ["9" * 400, "9" * 5000, "1.2.3", "٣", "1e400"])
def test_a_size_that_is_none_is_unknown(digits: str) -> None:
    size = f"{digits} GiB"
    text = (
        f"CUDA out of memory. Tried to allocate {size}. GPU {digits} has a total capacity of {size} of "
        f"which {size} is free. Process {digits} has {size} memory in use. this process has {size} memory in "
        f"use. Of the allocated memory {size} is allocated by PyTorch, and {size} is reserved by PyTorch but "
        f"unallocated.\nDefaultCPUAllocator: can't allocate memory: you tried to allocate {digits} bytes\n"
        f"[rank{digits}]: Failed to CUDA calloc {digits} bytes\n"
        f"CUDA out of memory. Tried to allocate 1 GiB (GPU {digits}; {size} total capacity; {size} already "
        f"allocated; {size} free; {size} reserved in total by PyTorch)"
    )
    report = read_log(text)
    assert report is not None
    assert describe_report(report)
    for message in find_messages(text):
        assert all(
            value in (None, 1 << 30)
            for value in (message.asked, message.total, message.free, message.process)
        )
