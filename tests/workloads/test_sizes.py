"""Named sizes: parameter counts by formula, against the real module and against what is published."""

import pytest
import torch

from fsdpbench.workloads import get_workload, workload_names

# What the names promise, in parameters: GPT-3's 350M at 356 M; OPT's 125m, 1.3b, 6.7b, 13b and 30b as they
# are; Pythia's 2.8b plus positions; 175B and 1T are the minGPTs of the FSDP paper and its predecessor. The
# sizes that the FSDP paper names without a shape: t5-611m, t5-2.28b, regnet-9b, deepvit-8b, dhen's dense
# part.
NAMED = {
    "gpt-125m": 125.2e6,
    "gpt-350m": 356e6,
    "gpt-1.3b": 1.316e9,
    "gpt-2.8b": 2.78e9,
    "gpt-6.7b": 6.66e9,
    "gpt-13b": 12.85e9,
    "gpt-30b": 29.97e9,
    "gpt-175b": 175.2e9,
    "gpt-1t": 1.009e12,
    "t5-611m": 611e6,
    "t5-2.28b": 2.28e9,
    "regnet-9b": 9.35e9,
    "deepvit-8b": 8.06e9,
    "dhen": 550e6,
}
# To the last parameter: Hugging Face's T5, Meta's Llama, torchvision's RegNet, the decoders' checkpoints.
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-xxl": 11_135_332_352,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "regnet-y-32gf": 145_046_770,
    "mistral-7b": 7_241_732_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma3-27b": 27_009_346_304,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}


def meta_parameters(workload, seq=None):
    with torch.device("meta"):
        model = workload.build(seq=seq)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", workload_names())
def test_formula_counts_what_the_module_has(name):
    workload = get_workload(name)
    assert workload.parameters == meta_parameters(workload)


def test_every_size_is_checked_against_its_name():
    assert {name for name in workload_names() if "tiny" not in name} == NAMED.keys() | PUBLISHED.keys()


@pytest.mark.parametrize(("name", "count"), NAMED.items())
def test_count_is_what_the_name_says(name, count):
    assert get_workload(name).parameters == pytest.approx(count, rel=0.002)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_count_is_the_published_one(name, count):
    assert get_workload(name).parameters == count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", ["learned", "none"])
def test_gpts_formula_follows_every_choice(tied, bias, positions):
    shape = {"layers": 2, "d_model": 24, "heads": 3, "vocab": 50, "expansion": 3, "max_seq": 10}
    workload = get_workload("gpt", shape=shape | {"tied": tied, "bias": bias, "positions": positions})
    assert workload.parameters == meta_parameters(workload)
    assert workload.count_parameters(17) == meta_parameters(workload, seq=17)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("t5-tiny", {"gated": True, "tied": False, "buckets": 8, "d_kv": 5}),
        ("llama-tiny", {"kv_heads": 1, "tied": True, "d_ff": 33}),
        ("regnet-tiny", {"widths": "16-48-96", "depths": "2-1-3", "stem": 7, "squeeze": 3, "classes": 5}),
        ("deepvit-tiny", {"expansion": 3, "patch": 4, "heads": 2}),
        ("dhen-tiny", {"features": 5, "numbers": 3, "tokens": 4, "hidden": 7}),
    ],
)
def test_other_formulas_follow_the_shape_too(name, shape):
    workload = get_workload(name, shape=shape)
    assert workload.parameters == meta_parameters(workload)


def test_memory_of_the_training_state():
    gpt, dhen = get_workload("gpt-2.8b"), get_workload("dhen")
    # Weight, gradient and two moments in float32.
    assert gpt.training_state_bytes == 16 * gpt.parameters
    # 768 B sparse parameters in half precision, and a float32 a row for their optimizer.
    sparse = 768 * 10**9
    tables = 2 * sparse + 4 * sparse // 128
    assert dhen.training_state_bytes == 16 * dhen.parameters + tables


def test_the_fsdp_papers_models_have_their_published_shapes():
    gpt, t5 = get_workload("gpt-175b").shape, get_workload("t5-11b").shape
    assert (gpt["layers"], gpt["d_model"], gpt["heads"], gpt["vocab"]) == (96, 12288, 96, 50000)
    assert (t5["layers"], t5["d_model"], t5["d_ff"], t5["heads"], t5["d_kv"]) == (24, 1024, 65536, 128, 128)
