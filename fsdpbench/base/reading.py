"""Input from untrusted sources: files within limits, and their text as one printable line.

Integers fit into 64 bits; nesting and size are bounded. If the path is not a readable file (a folder, a pipe
without a writer, an endless device), a one-line error says why. NaN and infinity are accepted; the code that
uses a key checks them. Pickles may hold only plain values: lists, dictionaries, strings, numbers.
"""

import csv
import json
import os
import pickle
import re
import resource
import select
import stat
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.numbers import LARGEST_INTEGER as LARGEST_INTEGER

JsonObject = dict[str, Any]
"""A JSON, TOML or pickled object as it was read, whose values are not checked yet, or a part of a file
without a schema: data of a device, a script or the compiler that is passed on unchanged."""

# Names, paths, causes and values may hold anything: terminal escape sequences, line breaks in text meant for
# one line, a megabyte. The text that is shown of them is printable and bounded.

LONGEST_LINE = 1000
_NOT_PRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""C0 and C1 controls, line and paragraph separators, invisible characters, those that change the direction of
writing, and halves of surrogate pairs (bytes of a path that are not UTF-8)."""


def printable(text: object) -> str:
    """Return `text` on one line: each control character is replaced by an escape such as `\\x1b`."""
    return _NOT_PRINTABLE.sub(_escaped, str(text))


def printable_lines(text: object) -> str:
    """Return `text` with its line breaks kept and each line `printable`."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """Return `text` printable, shortened in the middle if it is longer than `longest`."""
    whole = str(text)
    if len(whole) <= longest:
        whole = printable(whole)
    if len(whole) <= longest:
        return whole
    # The beginning names the subject, the end says what to do.
    left_out = f" … {len(whole) - longest:,} characters … "
    head, tail = 2 * longest // 3, longest // 3 - len(left_out)
    return f"{printable(whole[:head])[:head]}{left_out}{printable(whole[-tail:])[-tail:]}"


def all_on_one_line(tree: Any, longest: int = 4 * LONGEST_LINE) -> Any:
    """Return a JSON value with `one_line` of each text in it. Raises `RecursionError` if it is too deep."""
    if isinstance(tree, str):
        return one_line(tree, longest)
    if isinstance(tree, list):
        return [all_on_one_line(item, longest) for item in tree]
    if isinstance(tree, dict):
        return {one_line(key, longest): all_on_one_line(item, longest) for key, item in tree.items()}
    return tree


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(found[0])
    return known or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


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


class UnreadableError(UsageError, ValueError):
    """Input that is missing, too large or of the wrong kind. The message is one line: `origin` and `reason`.
    Catch it where unreadable files are not a user's mistake: a truncated result, another machine's lock."""

    def __init__(self, origin: object, reason: str) -> None:
        self.origin = one_line(origin, _LONGEST_REASON)
        self.reason = one_line(reason, _LONGEST_REASON)
        super().__init__(f"{self.origin}: {self.reason}")


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """Return the value in a JSON file of at most `largest` bytes. Raises `UnreadableError`."""
    return parse_json(read_bytes(path, largest), str(path))


def read_toml(path: Path, largest: int = LARGEST_TOML) -> JsonObject:
    """Return the tables in a TOML file of at most `largest` bytes. Raises `UnreadableError`."""
    return parse_toml(read_bytes(path, largest), str(path))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV table of the package, by column, without those that begin with `#`."""
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def read_text(path: Path, largest: int = LARGEST_JSON) -> str:
    """Return the text in a file of at most `largest` bytes of UTF-8. Raises `UnreadableError`."""
    return _text(read_bytes(path, largest), str(path))


def parse_json(content: bytes | str, origin: str) -> Any:
    """Return the value of JSON text; `origin` begins the message of an `UnreadableError`."""
    return _parsed(json.loads, _text(content, origin), origin, "JSON")


def parse_toml(content: bytes | str, origin: str) -> JsonObject:
    """Return the tables of TOML text; `origin` begins the message of an `UnreadableError`."""
    text = _text(content, origin)
    if _LONG_KEY.search(text):  # the parser's time and memory are quadratic in the number of a key's parts
        raise UnreadableError(origin, f"is not usable TOML (a key of more than {_MOST_KEY_PARTS} parts)")
    tables: JsonObject = _parsed(tomllib.loads, text, origin, "TOML")
    return tables


def _parsed(parse: Callable[[str], Any], text: str, origin: str, kind: str) -> Any:
    try:
        value = parse(text)
        _check_limits(value)
    except RecursionError:
        raise UnreadableError(origin, error_text("reading.too_deep", kind, DEEPEST)) from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, _BeyondLimitError) as error:
        raise UnreadableError(origin, f"is not usable {kind} ({error})") from None
    except (ValueError, OverflowError) as error:
        # Python refuses some values itself: an integer of more than 4,300 digits, an impossible date.
        reason = "a whole number is beyond 2^63-1" if "digits" in str(error) else str(error)
        raise UnreadableError(origin, f"is not usable {kind} ({reason})") from None
    return value


class _BeyondLimitError(ValueError):
    pass


def _check_limits(value: Any) -> None:
    """Raise `_BeyondLimitError` beyond a limit. Iterative: JSON may nest deeper than Python's stack."""
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
    """Return a file's content. A pipe without a writer is empty; with `await_writer`, wait seconds for one.
    Raises `UnreadableError`, also if `path` is not a file or is larger than `largest` bytes."""
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
    """Return standard input to its end, however long its writer takes. Call `on_wait` once if that takes
    long. Raises `UnreadableError` above `largest` bytes."""
    try:
        return _read_all("standard input", 0, largest, True, on_wait)
    except OSError as error:
        raise UnreadableError("standard input", f"cannot be read ({error.strerror or error})") from None


def read_tail(path: Path, most: int) -> str:
    """Return the last `most` bytes of a log as text; empty if there is no log."""
    try:
        with open(_opened(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most).decode(errors="replace")
    except (OSError, UnreadableError):
        return ""


def _opened(path: Path) -> int:
    # Do not block: opening a pipe without a writer would wait forever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        os.close(handle)
        raise UnreadableError(path, "is a folder, not a file")
    return handle


def _read_all(
    origin: object, handle: int, largest: int, silent: bool, on_wait: Callable[[], None] | None = None
) -> bytes:
    """Return all bytes up to the end. `silent`: there may be nothing to read yet."""
    parts: list[bytes] = []
    size, waited = 0, False
    ends = time.monotonic() + _WHOLE_PATIENCE_S
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while True:
        patience = _PIPE_PATIENCE_S if on_wait is None else _SILENCE_S
        if silent and not poll.poll(1000 * patience):
            if on_wait is None:
                raise UnreadableError(origin, f"gave nothing for {patience:g} s: does a process write to it?")
            if not waited:
                on_wait()
            waited = True
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


# Pickles may hold only plain values, so that no file can run code. Memory is bounded in proportion to the
# file's size: Python's unpickler allocates its memo for an index in the file before it reads any objects, so
# six bytes can ask for gigabytes.

_MEMORY_A_BYTE = 150
"""Bytes of memory per byte of a pickle, which creates at most an empty dictionary and a reference to it."""
_MEMORY_AT_LEAST = 256 << 20


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and plain values only are read")


def load_plain(file: IO[bytes], size: int) -> Any:
    """Return the values in a pickle of `size` bytes.

    Raises:
            MemoryError: it needs more memory than its size explains.
            EOFError: it is truncated.
            Exception: damaged pickles raise almost any error.
    """
    with bounded_memory(_MEMORY_A_BYTE * size + _MEMORY_AT_LEAST):
        return _PlainUnpickler(file).load()


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Raise MemoryError inside if this process allocates more than `more` additional bytes.

    The limit applies to all threads of the process. If the system does not report the size of the address
    space, there is no limit.
    """
    has = _address_space()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = has + more
    if not has or (soft != resource.RLIM_INFINITY and soft <= bound):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Return the bytes of this process's address space; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
