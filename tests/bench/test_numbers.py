"""Text becomes a number only where it is written in ASCII digits, by every option that takes one."""

from __future__ import annotations

from typing import Any

import click
import pytest

from fsdpbench.base.configuration.config import JitterSettings
from fsdpbench.base.configuration.simulated_cuda import VARIABLE, simulated_cuda
from fsdpbench.base.errors import UsageError
from fsdpbench.base.numbers import finite_number, whole_number, with_unit
from fsdpbench.base.settings import SETTINGS, read_list
from fsdpbench.cli.commands.tune import parse_memory
from fsdpbench.cli.group import _COMMANDS, command_named
from fsdpbench.cli.terminal.by_count import parse_tokens
from fsdpbench.sim.model.allocator.conf import AllocatorConf
from fsdpbench.sweep.hf_model import parse_shape
from fsdpbench.workloads.families.gpt import GPTShape
from fsdpbench.workloads.shape import make_shape

NOT_WHOLE = (
    "+1", "1_0", "１２", "٣", "४", "²", "①", "Ⅷ", "0x10", "0b1", "1e3", "1.0", " 1", "1 ",
    "1\n", "\t1", "1\u00a0",
    "--1", "- 1", "", "-", "one", "1,", "9" * 41, "1\0", "\u200b1", "−1",
)  # fmt: skip
NOT_FINITE = (
    "+1", "1_0.5", "1.5_0", "１.５", "٣", "infinity", "-inf", "nan", "NaN", "1e400", "0x1p3", " 1.5",
    "1.5\n", "1..5",
    ".", "e5", "1e", "1e5.0", "", "²", "1,5", "1\u066b5",
)  # fmt: skip
SPACED = (" 1", "1 ", "\t1")
"""Settings stand in lists (`1, 2`): blanks of ASCII around a value are no part of it."""


@pytest.mark.parametrize("text", NOT_WHOLE)
def test_whole_numbers_are_ascii_digits(text: str) -> None:
    with pytest.raises(ValueError):
        whole_number(text)


@pytest.mark.parametrize("text", NOT_FINITE)
def test_finite_numbers_are_ascii_digits(text: str) -> None:
    with pytest.raises(ValueError):
        finite_number(text)


def test_numbers_in_ascii_digits_are_taken() -> None:
    assert [whole_number(text) for text in ("0", "-7", "007", str(2**63 - 1))] == [0, -7, 7, 2**63 - 1]
    assert [finite_number(text) for text in ("1", "1.", ".5", "-2.5e-3", "1e+06")] == [
        1,
        1,
        0.5,
        -0.0025,
        1e6,
    ]
    assert with_unit("80 GB", {"gb": 10**9}) == 80 * 10**9
    assert with_unit("1.5t", {"t": 10**12}) == 1_500_000_000_000


@pytest.mark.parametrize(
    "text", ["80ＧＢ", "８0GB", "80\u212aB", "1e400GB", "1_0GB", "+80GB", "infGB", "80 GB ", "1.2.3GB"]
)
def test_sizes_are_ascii(text: str) -> None:
    with pytest.raises(UsageError):
        parse_memory(text)
    with pytest.raises(UsageError):
        parse_tokens(text.replace("GB", "B"))


def options() -> list[tuple[str, click.Option]]:
    found = []
    for name in _COMMANDS:
        command: Any = command_named(name)
        commands = command.commands.items() if isinstance(command, click.Group) else [(name, command)]
        found += [(word, p) for word, each in commands for p in each.params if isinstance(p, click.Option)]
    return found


def refuses(option: click.Option, text: str) -> bool:
    try:
        option.type.convert(text, option, None)
    except click.BadParameter:
        return True
    return False


def test_every_option_that_takes_a_number_takes_ascii_digits_alone() -> None:
    seen = 0
    for command, option in options():
        if not isinstance(
            option.type, click.IntRange | click.FloatRange | type(click.INT) | type(click.FLOAT)
        ):
            continue
        seen += 1
        wrong = NOT_WHOLE if isinstance(option.type, click.IntRange) else NOT_FINITE
        for text in wrong:
            assert refuses(option, text), f"{command} {option.opts} takes {text!r}"
    assert seen > 20


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_no_setting_takes_other_digits(name: str) -> None:
    for text in NOT_WHOLE + NOT_FINITE:
        if text.strip(" \t") != text or text in ("1.0", "9" * 41):
            continue
        for whole in (text, f"every-{text}", f"size:{text}", f"op-every-{text}"):
            try:
                values = read_list(name, whole)
            except UsageError:
                continue
            assert not any(
                isinstance(value, int | float) for value in values if not isinstance(value, bool)
            ) or (text in ("1e3", "1,", "1,5", "1e400")), f"{name} took {whole!r}: {values}"


def test_shapes_jitter_allocator_and_environment_take_ascii_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("+1", "1_0", "１", "٣"):
        with pytest.raises(ValueError):
            make_shape(GPTShape, parse_shape(f"layers={text},d_model=32,heads=1,vocab=64,max_seq=16"))
        with pytest.raises(UsageError):
            JitterSettings.parse(f"seed={text}")
        with pytest.raises(ValueError):
            AllocatorConf.parse(f"max_split_size_mb:{text}")
        monkeypatch.setenv(VARIABLE, f"h100-80gb:{text}")
        with pytest.raises(UsageError, match="how many GPUs"):
            simulated_cuda()
