"""Current models: configurations as published (facts of `tests/data/current_models.json`, sources there).

Each has the library's own number of parameters; `tests/bench/campaign` simulates a step of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.hf_config import translate

pytest.importorskip("transformers")

MODELS = json.loads((Path(__file__).parents[2] / "data" / "current_models.json").read_text())
PUBLISHED = {
    "deepseek-v3": 671_026_404_352,
    "minimax-m2": 228_689_748_992,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "qwen3-vl-8b": 8_190_735_360,
    "granite-3.3-8b": 8_170_864_640,
}


def librarys_own_count(config: dict[str, Any]) -> int:
    """Of the library's class for the text model, without anything of ours."""
    import torch
    import transformers

    kind = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    if config.get("architectures") == ["MiniMaxM2ForCausalLM"]:
        kind = "minimax_m2"
    foreign = ("model_type", "auto_map", "quantization_config", "torch_dtype")
    settings = transformers.CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k not in foreign})
    text = getattr(settings, "text_config", None)
    with torch.device("meta"):
        if text is not None and type(text) not in transformers.AutoModelForCausalLM._model_mapping:
            whole = transformers.AutoModelForImageTextToText.from_config(settings)
            inner = getattr(whole.model, "language_model", None)
            head = {id(p): p for p in [*inner.parameters(), *whole.lm_head.parameters()]}
            return sum(p.numel() for p in head.values())
        if text is not None:
            text.tie_word_embeddings = config.get("tie_word_embeddings", text.tie_word_embeddings)
        for head in ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM"):
            auto = getattr(transformers, head)
            is_other = (text or settings).is_encoder_decoder != (head == "AutoModelForSeq2SeqLM")
            if not is_other and type(text or settings) in auto._model_mapping:
                model = auto.from_config(text or settings)
                return sum(p.numel() for p in model.parameters())
    raise AssertionError(f"no class for {kind}")


def test_there_are_enough() -> None:
    assert len(MODELS) >= 80
    assert {entry["source"] for entry in MODELS.values()} == {
        "from memory",
        "defaults of the library's class",
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_as_published(name: str) -> None:
    found = translate(MODELS[name]["config"])
    assert get_workload("hf:x", {"family": found.family, **found.values}).parameters == PUBLISHED[name]


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
def test_counts_are_the_librarys(name: str) -> None:
    found = translate(MODELS[name]["config"])
    workload = get_workload("hf:x", {"family": found.family, **found.values})
    assert workload.parameters == librarys_own_count(MODELS[name]["config"])
