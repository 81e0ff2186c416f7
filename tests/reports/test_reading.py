"""Readers of JSON and TOML: what lies at a path is a value within limits, or one line that says why not."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.reading import UnreadableError, printable, read_bytes, read_json, read_toml

Reader = Callable[[Path], Any]
DEEP = 10_000
HOSTILE_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not usable JSON"),
    "cut off": (b'{"a": 1', "not usable JSON"),
    "nul": (b'{"a": \0}', "not usable JSON"),
    "latin-1": (b'{"a": "\xe4"}', "not UTF-8 text (at byte 7)"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "integer of 5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "beyond 2^63-1"),
    "integer of 20 digits": (b'{"a": [1, {"b": 18446744073709551615}]}', "a[1].b is beyond 2^63-1"),
    "deep lists": (b"[" * DEEP + b"]" * DEEP, "nested"),
    "deep objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested"),
    "200 levels": (b"[" * 200 + b"]" * 200, "nested more than 100 levels"),
}
HOSTILE_TOML: dict[str, tuple[bytes, str]] = {
    "no value": (b"a =\n", "not usable TOML"),
    "nul": (b'a = "\0"\n', "not usable TOML"),
    "latin-1": (b'a = "\xe4"\n', "not UTF-8"),
    "twice": (b"a = 1\na = 2\n", "not usable TOML"),
    "integer of 5,000 digits": (b"a = " + b"9" * 5000, "beyond 2^63-1"),
    "hexadecimal": (b"a = 0x" + b"f" * 5000, "a is beyond 2^63-1"),
    "deep": (b"a = " + b"[" * DEEP + b"]" * DEEP, "nested"),
    "impossible date": (b"a = 2026-02-30\n", "not usable TOML"),
    "key of 20,000 parts": (b"a." * 20_000 + b"b = 1\n", "more than 64 parts"),
    "table of 20,000 parts": (b"[" + b"'a' . " * 20_000 + b"b]\n", "more than 64 parts"),
}


def refusal(read: Reader, path: Path) -> str:
    with pytest.raises(UnreadableError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(printable(path)[:100])
    assert "\n" not in message
    assert len(message) < 700
    return message


@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_hostile_json_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE_JSON[name]
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert reason in refusal(read_json, path)


@pytest.mark.parametrize("name", HOSTILE_TOML)
def test_hostile_toml_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE_TOML[name]
    path = tmp_path / "file.toml"
    path.write_bytes(content)
    assert reason in refusal(read_toml, path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "pipe", "not usable JSON"),  # nobody writes to it: read as empty, and never waited for
        (Path("/dev/zero"), "larger than 64 MiB"),
        (tmp_path / "a\0b", "is not a valid path"),
        (tmp_path / "\ud800", "is not a valid path"),
        (tmp_path / ("n" * 5000), "too long"),
    ):
        assert reason in refusal(read_json, path)


def test_what_a_shell_pipes_in_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"a": 1}')
    os.close(writer)
    assert read_json(Path(f"/dev/fd/{reader}")) == {"a": 1}
    os.close(reader)


def test_the_largest_size_is_the_callers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 11)
    assert len(read_bytes(path, 11)) == 11
    with pytest.raises(UnreadableError, match="larger than"):
        read_bytes(path, 10)


def test_valid_content_passes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'\xef\xbb\xbf{"a": [9223372036854775807, true, null, NaN, "\xc3\xa4"]}')
    whole, yes, nothing, unknown, text = read_json(path)["a"]
    assert (whole, yes, nothing, text) == (2**63 - 1, True, None, "ä")
    assert math.isnan(unknown)
    path.write_bytes(b'\xef\xbb\xbfa.b = [-9223372036854775807, inf]\nc = "' + b"x." * 100 + b'"\n')
    assert read_toml(path) == {"a": {"b": [-(2**63) + 1, math.inf]}, "c": "x." * 100}
