"""Names and shapes: what is known, what is overridden, what is refused and how."""

from dataclasses import dataclass

import pytest

from fsdpbench.workloads import (
    ShapeError,
    UnknownModelError,
    WorkloadError,
    families,
    get_workload,
    workload_names,
)
from fsdpbench.workloads.shape import make_shape

EXPECTED = ["tiny", "125m", "350m", "1.3b", "2.8b", "6.7b", "13b", "30b", "175b", "1t"]


def test_names_and_families():
    gpts = [name for name in workload_names() if get_workload(name).family == "gpt"]
    assert gpts == [f"gpt-{size}" for size in EXPECTED]
    assert families() == ("gpt", "t5", "llama", "decoder", "regnet", "deepvit", "dhen")
    for family in families():
        assert any(get_workload(name).family == family for name in workload_names())


@pytest.mark.parametrize("name", workload_names())
def test_a_name_is_kept_and_sizes_rise(name):
    workload = get_workload(name)
    assert workload.name == name
    assert workload.family in families()
    assert workload.default_seq == workload.shape.get("max_seq")


def test_sizes_rise():
    counts = [get_workload(f"gpt-{size}").parameters for size in EXPECTED]
    assert counts == sorted(counts)


def test_family_with_a_shape_of_ones_own():
    shape = {"layers": 32, "d_model": 4096, "heads": 32, "vocab": 50368, "tied": True, "bias": False}
    workload = get_workload("gpt", shape=shape)
    assert workload.shape == shape | {
        "positions": "learned",
        "expansion": 4,
        "max_seq": 2048,
        "fp32_loss": True,
        "attention": "fused",
        "dropout": 0.0,
    }
    assert workload.name == "gpt+layers=32,d_model=4096,heads=32,vocab=50368,tied=true,bias=false"


def test_text_values_are_understood():
    text = {
        "layers": "2",
        "d_model": "16",
        "heads": "4",
        "tied": "true",
        "bias": "False",
        "positions": "none",
    }
    shape = get_workload("gpt", shape=text).shape
    assert (shape["layers"], shape["tied"], shape["bias"], shape["positions"]) == (2, True, False, "none")


def test_overriding_a_named_size_shows_in_its_name():
    assert get_workload("gpt-2.8b", shape={"layers": 4}).name == "gpt-2.8b+layers=4"
    assert get_workload("gpt-2.8b", shape={"layers": "32"}).name == "gpt-2.8b"
    assert get_workload("gpt-2.8b", shape={"layers": 4}).shape["d_model"] == 2560


@pytest.mark.parametrize(
    ("asked", "near"),
    [("gpt-2.7b", "gpt-2.8b"), ("gtp", "gpt"), ("GPT-13b", "gpt-13b"), ("gpt-tiney", "gpt-tiny")],
)
def test_unknown_model_offers_the_nearest(asked, near):
    with pytest.raises(UnknownModelError, match=f"unknown model '{asked}'") as caught:
        get_workload(asked)
    assert near in caught.value.nearest
    assert near in str(caught.value)


def test_unknown_model_unlike_any_lists_all():
    with pytest.raises(UnknownModelError, match="known models: gpt-tiny"):
        get_workload("zzzzzz")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"layer": 3}, "unknown shape field 'layer': did you mean layers"),
        ({"qqq": 3}, "unknown shape field 'qqq': The fields are layers, d_model, heads"),
        ({"layers": "three"}, "layers is 'three': it must be a whole number"),
        ({"layers": 2.5}, "layers is 2.5: it must be a whole number"),
        ({"layers": 0}, "layers is 0: it must be at least 1"),
        ({"tied": "maybe"}, "tied is 'maybe': it must be true or false"),
        ({"heads": 3}, "heads is 3: it must divide d_model, 128"),
        ({"positions": "rotary"}, "positions is 'rotary': it must be one of learned, none"),
    ],
)
def test_bad_shape_is_refused_by_field(shape, message):
    with pytest.raises(ShapeError, match=message):
        get_workload("gpt-tiny", shape=shape)


def test_family_without_shape_or_with_half_of_one():
    with pytest.raises(ShapeError, match="'gpt' is a family and needs a shape"):
        get_workload("gpt")
    with pytest.raises(ShapeError, match="the shape lacks d_model, heads"):
        get_workload("gpt", shape={"layers": 2})


def test_a_family_that_is_also_a_size_is_the_size():
    assert get_workload("dhen").name == "dhen"
    assert get_workload("dhen", shape={"rows": 10}).name == "dhen+rows=10"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("t5-tiny", {"buckets": 6}, "buckets is 6: it must be a multiple of 4"),
        ("t5-tiny", {"attention": "flash"}, "attention is 'flash': it must be one of fused, explicit"),
        ("llama-tiny", {"kv_heads": 3}, "kv_heads is 3: it must divide heads, 4"),
        ("llama-tiny", {"d_model": 12}, "each is 3 wide, and rotary positions take pairs"),
        ("regnet-tiny", {"widths": "32,64"}, "widths is '32,64': it must be numbers from 1 joined by -"),
        ("regnet-tiny", {"depths": "1"}, "widths and depths have 2 and 1 stages"),
        ("regnet-tiny", {"group_width": 24}, "group_width is 24: it must divide each of widths, 32 too"),
        ("deepvit-tiny", {"patch": 5}, "patch is 5: it must divide image, 32"),
        ("dhen-tiny", {"tokens": 1}, "tokens is 1"),
        ("dhen-tiny", {"table_dtype": "int8"}, "table_dtype is 'int8': it must be one of fp32, bf16, fp16"),
    ],
)
def test_bad_shapes_of_other_families_are_refused_by_field(name, shape, message):
    with pytest.raises(ShapeError, match=message):
        get_workload(name, shape=shape)


@pytest.mark.parametrize("name", ["regnet-tiny", "deepvit-tiny", "dhen-tiny"])
def test_models_without_sequences_refuse_one(name):
    workload = get_workload(name)
    for use in (
        lambda: workload.build(seq=8),
        lambda: workload.batches(1, 8, 0, 0, "cpu"),
        lambda: workload.flops_per_step(1, 8),
        lambda: workload.tokens(1, 8),
    ):
        with pytest.raises(WorkloadError, match=f"seq is 8, but {name} does not work on sequences"):
            use()


@pytest.mark.parametrize("name", ["gpt-tiny", "t5-tiny", "llama-tiny"])
def test_sequences_have_a_token_at_least(name):
    with pytest.raises(WorkloadError, match="seq is 0: it must be at least 1"):
        get_workload(name).build(seq=0)


def test_a_model_of_a_configuration_file_names_its_family_in_its_shape():
    shape = {"family": "llama", "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "kv_heads": 2}
    workload = get_workload("hf:my-llama", shape)
    assert (workload.name, workload.family, workload.shape["layers"]) == ("hf:my-llama", "llama", 2)
    with pytest.raises(ShapeError, match="does not name its family"):
        get_workload("hf:my-llama")
    with pytest.raises(ShapeError, match="unknown shape field 'window'"):
        get_workload("hf:my-llama", shape | {"window": 3})


@pytest.mark.parametrize("annotations", ["int", "'int'"])
def test_a_users_own_shape_may_have_types_or_texts_as_annotations(annotations):
    names = {"dataclass": dataclass}
    code = f"@dataclass\nclass Own:\n layers: {annotations}\n rate: 'float' = 0.5\n tied: bool = False\n"
    exec(code, names)
    made = make_shape(names["Own"], {"layers": "3", "rate": "0.25", "tied": "yes"})
    assert vars(made) == {"layers": 3, "rate": 0.25, "tied": True}
    with pytest.raises(ShapeError, match="layers is 'x': it must be a whole number"):
        make_shape(names["Own"], {"layers": "x"})
