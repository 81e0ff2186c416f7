"""Named sizes: parameter counts by formula, against the real module and against what is published."""

import pytest
import torch

from workloads import get_workload, workload_names

# What the names promise, in parameters: GPT-3's 350M at 356 M; OPT's 125m, 1.3b, 6.7b, 13b and 30b as they
# are; Pythia's 2.8b plus positions; 175B and 1T are the minGPTs of the FSDP paper and its predecessor.
PUBLISHED = {
    "gpt-125m": 125.2e6,
    "gpt-350m": 356e6,
    "gpt-1.3b": 1.316e9,
    "gpt-2.8b": 2.78e9,
    "gpt-6.7b": 6.66e9,
    "gpt-13b": 12.85e9,
    "gpt-30b": 29.97e9,
    "gpt-175b": 175.2e9,
    "gpt-1t": 1.009e12,
}


def meta_parameters(workload, seq=None):
    with torch.device("meta"):
        model = workload.build(seq=seq)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", workload_names())
def test_formula_counts_what_the_module_has(name):
    workload = get_workload(name)
    assert workload.parameters == meta_parameters(workload)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_count_is_the_published_one(name, count):
    assert get_workload(name).parameters == pytest.approx(count, rel=0.002)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", ["learned", "none"])
def test_formula_follows_every_choice(tied, bias, positions):
    shape = {"layers": 2, "d_model": 24, "heads": 3, "vocab": 50, "expansion": 3, "max_seq": 10}
    workload = get_workload("gpt", shape=shape | {"tied": tied, "bias": bias, "positions": positions})
    assert workload.parameters == meta_parameters(workload)
    assert workload.count_parameters(17) == meta_parameters(workload, seq=17)


def test_the_fsdp_papers_model_has_its_published_shape():
    shape = get_workload("gpt-175b").shape
    assert (shape["layers"], shape["d_model"], shape["heads"], shape["vocab"]) == (96, 12288, 96, 50000)
