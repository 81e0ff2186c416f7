"""Reads JSON and TOML that anybody may have written: a value within limits, or one line that says why not.

Whole numbers fit into 64 bits, nesting and size are bounded, and whatever is at the path (a folder, a pipe
without a writer, a device that never ends) is answered. NaN and infinity pass: what they mean is for
those to say who know the key.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpbench.numbers import LARGEST_INTEGER as LARGEST_INTEGER
from fsdpbench.reports.hta_text import one_line

MIB = 1 << 20
LARGEST_JSON = 64 * MIB
LARGEST_TOML = 16 * MIB
DEEPEST = 100
_MOST_KEY_PARTS = 64
_LONGEST_REASON = 300
_PIPE_PATIENCE_S = 10.0
_WHOLE_PATIENCE_S = 60.0
_SILENCE_S = 1.0
_LONG_KEY = re.compile(
    r"""^[ \t]*+\[{0,2}+(?:[ \t]*+(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.)"""
    rf"{{{_MOST_KEY_PARTS}}}",
    re.MULTILINE,
)


class UnreadableError(ValueError):
    """What cannot be read as what it should be. The message is one line: its `origin`, and the `reason`."""

    def __init__(self, origin: object, reason: str) -> None:
        self.origin = one_line(origin, _LONGEST_REASON)
        self.reason = one_line(reason, _LONGEST_REASON)
        super().__init__(f"{self.origin}: {self.reason}")


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """The value in a JSON file of at most `largest` bytes. Raises `UnreadableError`."""
    return parse_json(read_bytes(path, largest), str(path))


def read_toml(path: Path, largest: int = LARGEST_TOML) -> dict[str, Any]:
    """The tables in a TOML file of at most `largest` bytes. Raises `UnreadableError`."""
    return parse_toml(read_bytes(path, largest), str(path))


def read_text(path: Path, largest: int) -> str:
    """The text in a file of at most `largest` bytes of UTF-8. Raises `UnreadableError`."""
    return _text(read_bytes(path, largest), str(path))


def parse_json(content: bytes | str, origin: str) -> Any:
    """`read_json` for what is read already; `origin` begins the message of an `UnreadableError`."""
    return _parsed(json.loads, _text(content, origin), origin, "JSON")


def parse_toml(content: bytes | str, origin: str) -> dict[str, Any]:
    """`read_toml` for what is read already; `origin` begins the message of an `UnreadableError`."""
    text = _text(content, origin)
    if _LONG_KEY.search(text):  # time and memory of the parser grow with the square of a key's parts
        raise UnreadableError(origin, f"is not usable TOML (a key of more than {_MOST_KEY_PARTS} parts)")
    tables: dict[str, Any] = _parsed(tomllib.loads, text, origin, "TOML")
    return tables


def _parsed(parse: Callable[[str], Any], text: str, origin: str, kind: str) -> Any:
    try:
        value = parse(text)
        _check_limits(value)
    except RecursionError:
        raise UnreadableError(
            origin, f"is not usable {kind} (nested more than {DEEPEST} levels deep)"
        ) from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, _BeyondLimitError) as error:
        raise UnreadableError(origin, f"is not usable {kind} ({error})") from None
    except (ValueError, OverflowError) as error:
        # What Python itself refuses inside a value: a number of more than 4,300 digits, an impossible date.
        reason = "a whole number is beyond 2^63-1" if "digits" in str(error) else str(error)
        raise UnreadableError(origin, f"is not usable {kind} ({reason})") from None
    return value


class _BeyondLimitError(ValueError):
    pass


def _check_limits(value: Any) -> None:
    """Without recursion: the nesting that a parser gets through may be more than Python's stack holds."""
    waiting: list[tuple[Any, str, int]] = [(value, "", 0)]
    while waiting:
        node, where, depth = waiting.pop()
        if isinstance(node, int) and abs(node) > LARGEST_INTEGER:
            raise _BeyondLimitError(f"{where or 'its value'} is beyond 2^63-1")
        if not isinstance(node, dict | list):
            continue
        if depth == DEEPEST:
            raise _BeyondLimitError(f"nested more than {DEEPEST} levels deep")
        if isinstance(node, dict):
            waiting += ((item, f"{where}.{key}" if where else key, depth + 1) for key, item in node.items())
        elif any(isinstance(item, dict | list | int) for item in node):
            waiting += ((item, f"{where}[{index}]", depth + 1) for index, item in enumerate(node))


def _text(content: bytes | str, origin: str) -> str:
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(origin, f"is not UTF-8 text (at byte {error.start:,})") from None


def read_bytes(path: Path, largest: int, *, await_writer: bool = False) -> bytes:
    """A file's content; of a pipe that has no writer (yet) nothing, or with `await_writer` what comes within
    seconds. Raises `UnreadableError`, also for what is not a file or larger than `largest`."""
    try:
        handle = _opened(path)
        try:
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode) and found.st_size > largest:
                raise _too_large(path, largest)
            return _read_all(path, handle, largest, await_writer)
        finally:
            os.close(handle)
    except OSError as error:
        raise UnreadableError(path, f"cannot be read ({error.strerror or error})") from None
    except UnreadableError:
        raise
    except ValueError as error:  # a NUL or half a surrogate pair in the path
        raise UnreadableError(path, f"is not a valid path ({error})") from None


def read_standard_input(largest: int, on_wait: Callable[[], None]) -> bytes:
    """Standard input, to its end: for as long as its writer lives, and `on_wait` is called where that takes
    long. Raises `UnreadableError` past `largest`."""
    try:
        return _read_all("standard input", 0, largest, True, on_wait)
    except OSError as error:
        raise UnreadableError("standard input", f"cannot be read ({error.strerror or error})") from None


def read_tail(path: Path, most: int) -> str:
    """The last `most` bytes of a log, as far as they are text; empty where there is none."""
    try:
        with open(_opened(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most).decode(errors="replace")
    except (OSError, UnreadableError):
        return ""


def _opened(path: Path) -> int:
    # Not blocking: a pipe without a writer would hold the command for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        os.close(handle)
        raise UnreadableError(path, "is a folder, not a file")
    return handle


def _read_all(
    origin: object, handle: int, largest: int, silent: bool, on_wait: Callable[[], None] | None = None
) -> bytes:
    """To the end. `silent`: nothing is to be read yet, for all that is known."""
    parts: list[bytes] = []
    size, told = 0, False
    ends = time.monotonic() + _WHOLE_PATIENCE_S
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while True:
        patience = _PIPE_PATIENCE_S if on_wait is None else _SILENCE_S
        if silent and not poll.poll(1000 * patience):
            if on_wait is None:
                raise UnreadableError(origin, f"gave nothing for {patience:g} s: does a process write to it?")
            if not told:
                on_wait()
            told = True
            poll.poll()
        try:
            part = os.read(handle, MIB)
        except BlockingIOError:
            silent = True
            continue
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > largest:
            raise _too_large(origin, largest)
        if on_wait is None and time.monotonic() > ends:
            raise UnreadableError(origin, f"was not at its end after {_WHOLE_PATIENCE_S:g} s")


def _too_large(origin: object, largest: int) -> UnreadableError:
    return UnreadableError(origin, f"is larger than {largest // MIB} MiB, more than is read of such files")
