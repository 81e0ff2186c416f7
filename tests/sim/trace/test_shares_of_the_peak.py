"""Simulated traces know their chip and the work of their kernels, and no kernel is faster than the chip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.reports.analysis import analyze_trace
from fsdpbench.reports.pages.trace_parts import work_tables
from fsdpbench.reports.readers import read_trace


@pytest.mark.simulated
def test_shares_of_the_peak_are_those_of_the_shapes(tmp_path: Path) -> None:
    from device_training import build, start

    sim = start(8)
    step = build("fsdp2", 8, {"width": 1024, "layers": 2, "checkpointing": True}, (4, 512))
    step()
    with sim.trace(tmp_path / "rank0_trace.json.gz") as trace:
        step()
        trace.step()
    rank = analyze_trace(read_trace(tmp_path / "rank0_trace.json.gz"))
    tables = rank.tables
    assert tables.roof == "a100-80gb"
    kernels = {kernel.name: kernel for kernel in tables.kernels}
    up = kernels["gemm_bf16_2048x4096x1024"]  # forward, and again in backward
    assert up.rate.flops == 2 * 2048 * 4096 * 1024 * up.count
    share = up.rate.to_dict()["roof_share"]
    assert share == pytest.approx(up.rate.flops / 312e12 / (up.time * 1e-9))
    assert 0.2 < share < 1
    attention = kernels["flash_fwd_kernel_bf16"]
    assert attention.rate.flops == 4 * 4 * 512 * 512 * 1024 // 2 * attention.count
    gelu = kernels["gelu_kernel"].rate.to_dict()
    assert 1e11 < gelu["bytes_per_s"] < 2039e9
    for kernel in (*tables.kernels, *tables.operators):
        assert (kernel.rate.to_dict()["roof_share"] or 0) <= 1, kernel
    known = sum(kernel.time for kernel in tables.kernels if kernel.rate.time)
    assert known > 0.7 * tables.total
    shown = work_tables(tables, 1)
    assert "The peak is a100-80gb's" in shown["roof_note"]
    assert "no shapes" not in shown["roof_note"]
    (unknown,) = [row for row in shown["kernels"]["rows"] if row[0] == "fused_adamw_kernel"]
    assert unknown[-3:] == ("–", "–", "–")


RUNS = {
    "fp8": "--model llama3-8b --gpus 64 --hardware h100-80gb --batch 1 --linear-dtype fp8",
    "compiled": "--model llama3-8b --gpus 64 --hardware h100-80gb --batch 1 --compile true",
    "nvfp4": "--model llama3-8b --gpus 64 --hardware b200 --batch 1 --linear-dtype nvfp4",
    "mixture": "--model qwen3-30b-a3b --gpus 64 --hardware h100-80gb --batch 1 --optimizer sgd",
    "float32": "--model t5-large --gpus 8 --hardware a100-80gb --batch 8 --param-dtype fp32",
    "convolutions": "--model regnet-9b --gpus 16 --hardware a100-40gb --batch 8",
    "offloaded": "--model deepvit-8b --gpus 16 --hardware h100-80gb --batch 8 --cpu-offload true",
    "adapters": "--model llama3-8b --gpus 8 --hardware h100-80gb --batch 1 --lora 16",
    "tensor parallel": "--model llama3-8b --gpus 16 --hardware h100-80gb --batch 2 --tp 4",
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", RUNS)
def test_no_kernel_is_faster_than_its_chip(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fsdpbench", "run", "--device", "sim", *RUNS[name].split()]
    subprocess.run([*command, "-o", str(tmp_path / "run")], check=True, capture_output=True)
    (path,) = tmp_path.rglob("*_trace.json.gz")
    told = json.loads(json.dumps(analyze_trace(read_trace(path)).to_dict()))
    assert told["roof"] == RUNS[name].split("--hardware ")[1].split()[0]
    shares = {
        (each["name"], each.get("shapes")): each["roof_share"]
        for each in (*told["kernels"], *told["operators"])
        if each["roof_share"] is not None
    }
    assert len(shares) > 20
    assert max(shares.values()) <= 1, max(shares, key=lambda key: shares[key])
