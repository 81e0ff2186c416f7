"""Settings: every value as people type it, and errors that name the way out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpbench.base.errors import ExitCode, UsageError
from fsdpbench.base.settings import SETTINGS, Settings, setting_named, show_value


def test_every_default_is_a_value_of_its_setting() -> None:
    for setting in SETTINGS.values():
        assert setting.read(setting.default) == setting.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("limit_all_gathers", "off", "off"),
        ("limit_all_gathers", "3", 3),
        ("limit_all_gathers", "auto", "auto"),
        ("wrap", "every-04", "every-4"),
        ("wrap", "size:1e8", "size:100000000"),
        ("wrap", "Block+Embedding", "Block+Embedding"),
        ("strategy", "full_shard", "FULL_SHARD"),
        ("param_dtype", "bfloat16", "bf16"),
        ("reshard_after_forward", "false", False),
        ("reshard_after_forward", "4", 4),
        ("forward_prefetch", "off", 0),
        ("activation_checkpointing", "every-2", "every-2"),
        ("seq", "model", None),
        ("cpu_offload", "on", True),
    ],
)
def test_reads_what_people_type(name: str, text: str, value: object) -> None:
    assert setting_named(name).read(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("batch", "0"),
        ("batch", "many"),
        ("wrap", "every-0"),
        ("wrap", "size:-1"),
        ("wrap", "two words"),
        ("strategy", "ZERO3"),
        ("backward_prefetch", "prefetch"),
        ("limit_all_gathers", "-1"),
        ("activation_checkpointing", "every-x"),
    ],
)
def test_refuses_with_name_value_and_choices(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        setting_named(name).read(text)
    message = str(caught.value)
    assert name in message
    assert text in message
    assert SETTINGS[name].values in message
    assert caught.value.exit_code is ExitCode.USAGE


def test_an_unknown_setting_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="backward_prefetch"):
        Settings.of(backward_prefetc="pre")


def test_dashes_and_underscores_name_the_same_setting() -> None:
    assert setting_named("backward-prefetch") is setting_named("backward_prefetch")


@given(st.sampled_from(sorted(SETTINGS)), st.text(max_size=12))
def test_any_text_is_a_value_or_a_usage_error(name: str, text: str) -> None:
    try:
        value = setting_named(name).read(text)
    except UsageError:
        return
    shown = "none" if value is None else show_value(value)
    assert setting_named(name).read(shown) == value


def test_a_record_keeps_what_does_not_apply() -> None:
    settings = Settings.of(batch=4).changed(limit_all_gathers=None)
    assert Settings.from_record(settings.to_dict()) == settings


def test_records_from_before_a_setting_ran_its_default() -> None:
    record = Settings.of(batch=3).to_dict()
    for name in (
        "lora",
        "lora_targets",
        "lora_base",
        "implementation",
        "layout",
        "activation_offload",
        "graph",
        "symmetric_memory",
        "keep_last_unsharded",
        "optimizer_dtype",
        "linear_dtype",
        "checkpoint_first",
        "clip",
        "norm",
        "attention",
        "rotary",
        "loss",
    ):
        del record[name]
    assert Settings.from_record(record) == Settings.of(batch=3)
    del record["batch"]
    with pytest.raises(UsageError, match="lacks the settings batch"):
        Settings.from_record(record)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("lora", "off", 0), ("lora", "16", 16), ("lora_targets", "query+value", "query+value")],
)
def test_settings_of_adapters(name: str, text: str, value: object) -> None:
    assert setting_named(name).read(text) == value


@pytest.mark.parametrize(
    ("name", "text"), [("lora", "-1"), ("lora", "auto"), ("lora_targets", "query,up-down")]
)
def test_what_adapters_cannot_be(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        setting_named(name).read(text)
