"""The setting `attention`: which kernel runs, on which device, what it costs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import _cur_sdpa_kernel_backends

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.residuals.intervals import interval_of
from fsdpbench.engine.results.residuals.widths import Unknown
from fsdpbench.reports.result import Result
from fsdpbench.sweep.planning import make_config, make_target
from fsdpbench.systems.registry import get_system
from fsdpbench.systems.training import attention_as_asked


def a_config(
    model: str = "llama-tiny",
    device: str = "sim",
    hardware: str | None = "h100-80gb",
    shape: dict[str, Any] | None = None,
    software: str | None = None,
    **settings: Any,
) -> Config:
    target = make_target(
        model=model, shape=shape or {}, device=device, hardware=hardware, gpus=2, gpus_per_node=None,
        data=None, software=software,
    )  # fmt: skip
    return make_config(target, "torch-fsdp2", Settings.of(**settings), target.workload())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"hardware": "a100-80gb", "attention": "flash3"},
            "no figure of flash3 on a100-80gb is known: take fl",
        ),
        ({"hardware": "b200", "attention": "efficient"}, "no figure of efficient on b200"),
        ({"device": "cpu", "hardware": None, "attention": "cudnn"}, "CPU ranks have auto and math"),
        ({"device": "cuda", "hardware": None, "attention": "flash3"}, "package flash_attn_interface"),
        ({"attention": "flash2", "param_dtype": "fp32"}, "16 bits"),
        ({"model": "t5-tiny", "attention": "flex"}, "has a mask"),
        ({"model": "regnet-tiny", "attention": "math"}, "calls no kernel"),
        ({"model": "gpt-tiny", "shape": {"dropout": 0.1}, "attention": "flex"}, "drops nothing"),
        ({"attention": "math", "cp": 2}, "ring attention"),
        ({"device": "cuda", "hardware": None, "attention": "flex"}, "a script calls flex_attention"),
    ],
)
def test_what_no_kernel_can_do_is_refused(given: dict[str, Any], words: str) -> None:
    refused = get_system("torch-fsdp2").not_applicable(a_config(**given))
    assert words in refused["attention"]


def simulated(fsdpbench: Any, folder: Path, kernel: str, *words: str) -> dict[str, Any]:
    shape = "layers=2,d_model=1024,d_ff=1024,heads=8,kv_heads=8,vocab=512,max_seq=4096"
    run = (
        "run",
        "--json",
        "-o",
        str(folder / kernel),
        "--model",
        "llama-tiny",
        "--shape",
        shape,
        "--gpus",
        "2",
    )
    result: dict[str, Any] = fsdpbench.json(
        *run, "--device", "sim", "--batch", "8", "--attention", kernel, *words
    )
    return result


def test_each_kernel_has_its_own_time_and_memory(fsdpbench: Any, tmp_path: Path) -> None:
    of = {
        name: simulated(fsdpbench, tmp_path, name, "--hardware", "h100-80gb")
        for name in ("auto", "cudnn", "flash2", "math")
    }
    times = {name: each["step_time_s"] for name, each in of.items()}
    peaks = {name: each["peak_memory_bytes"]["allocated"] for name, each in of.items()}
    assert times["auto"] == times["cudnn"] < times["flash2"] < times["math"]
    assert peaks["auto"] == peaks["flash2"] < peaks["math"]
    scores = 2 * 8 * 8 * 4096 * 4096  # of one layer, 2 bytes each
    assert peaks["math"] - peaks["auto"] > 2 * scores
    assert "attention-math" in of["math"]["folder"]


@pytest.mark.campaign
def test_compiled_blocks_run_it_too(fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are kept on disk by graph, which calls the same function for every kernel."""
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    words = ("--hardware", "h100-80gb", "--compile", "true")
    math, auto, flash = (simulated(fsdpbench, tmp_path, name, *words) for name in ("math", "auto", "flash2"))
    assert math["step_time_s"] > flash["step_time_s"] > auto["step_time_s"]


def test_dated_software_runs_the_kernel_that_is_asked_for() -> None:
    """Its own kernel's rates (Triton's in 2022) do not count, and cuDNN's stays cuDNN's."""
    from fsdpbench.sim.model.profile import load_profile
    from fsdpbench.sim.model.software import load_software

    dated, chip = load_software("fsdp1-2022"), load_profile("h100-80gb")
    assert dated.applied_to(chip, "cudnn").attention == chip.attention
    assert dated.applied_to(chip).attention.forward_tflops < 400


def test_unmeasured_rates_widen_the_interval() -> None:
    result = Result.of({"status": "ok", "step_time_s": 1.0, "alloc_retries_per_step": 0.0})
    wide, known = (
        interval_of(a_config("gpt-2.8b", hardware="b200", attention=name), result)
        for name in ("flash2", "auto")
    )
    assert wide is not None
    assert known is not None
    assert wide.step_time_s[1] > 1.5 * known.step_time_s[1]
    assert Unknown.ATTENTION.value in wide.because
    assert Unknown.ATTENTION.value not in known.because


def test_real_devices_run_what_is_asked_for() -> None:
    """Torch's own choice returns afterwards."""
    query, key, value = (torch.randn(2, 4, 32, 16) for _ in range(3))
    ran = []
    for name in ("math", "auto"):
        config = a_config(device="cpu", hardware=None, attention=name)
        with torch.profiler.profile() as seen, attention_as_asked(config):
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
        ran.append({str(event.name) for event in seen.events()})
    assert "aten::_scaled_dot_product_attention_math" in ran[0]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran[1]


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [("cudnn", "CUDNN_ATTENTION"), ("flash2", "FLASH_ATTENTION"), ("efficient", "EFFICIENT_ATTENTION")],
)
def test_gpus_have_one_kernel_left(kernel: str, backend: str) -> None:
    with attention_as_asked(a_config(device="cuda", hardware=None, attention=kernel)):
        assert [each.name for each in _cur_sdpa_kernel_backends()] == [backend]
    assert len(_cur_sdpa_kernel_backends()) > 1
