"""A pasted log with an out-of-memory error: the message, the ranks, and by the traceback phase and line.

People paste what they have: quoted by mail, with the marks of launchers, time stamps and colours, as lines of
JSON, folded by a terminal. `_Text` takes that away first.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.reading import UnreadableError, parse_json, read_rows
from fsdpbench.reports.readers.out_of_memory import OomMessage, find_messages

_COLOURS = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_SHAPES = table_beside(__file__, "oom_log.toml")
_MARK = re.compile(rf"[ \t]*+(?:{'|'.join(_SHAPES['marks'])})[ ]?")
_LINES_AROUND, _MOST_LINES = (400, 40), 10_000
_READ_WHOLE = _LARGEST_JSON_LINE = 1 << 20
_FRAME = re.compile(
    r'File "(?P<file>[^"\n]{1,4096})", line (?P<line>[0-9]{1,9}), in (?P<name>[^\s(]{1,200})'
    r"|(?:File|│|^) ?(?P<file2>[^\s\":,│]{1,4096}\.py):(?P<line2>[0-9]{1,9}),? in (?P<name2>[^\s(]{1,200})",
    re.MULTILINE,
)
"""As Python prints them, and as IPython and rich do."""
_NEW_TRACEBACK = "Traceback (most recent call last)"
_LINES_BEFORE, _MOST_TRIED, _MOST_MARKS, _FOLDED_FROM = 2000, 100, 6, 40
_INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")
_TABLE = Path(__file__).parents[1] / "oom_phases.csv"
_PHASES = tuple((row["phase"], re.compile(row["pattern"])) for row in read_rows(_TABLE))
"""Of one frame, the first that fits. Names alone (`step`, `load`) do not count: programs have their own."""
_RECOMPUTES = re.compile(r"/torch/autograd/(?:__init__|graph)\.py|/torch/_tensor\.py")
_PINNED = re.compile(r"pin_memory|(?:cuda|hip)Host(?:Alloc|Register|Malloc)|HostAllocator")


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    name: str

    @property
    def is_own(self) -> bool:
        """Return whether the line is the user's, not an installed package's."""
        return not any(part in self.file for part in _INSTALLED)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class OomReport:
    """The content of a text about an out-of-memory error; None where the text does not say.

    ranks: those whose log holds such a message. where: the innermost line of the user's own program.
    operator: the innermost frame of all. also: the sources of other messages in the text.
    """

    message: OomMessage
    count: int
    ranks: tuple[int, ...]
    phase: str | None
    where: Frame | None
    operator: Frame | None
    also: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "message": self.message.to_dict(),
            "messages": self.count,
            "ranks": list(self.ranks),
            "phase": self.phase,
            "line": None if self.where is None else str(self.where),
            "innermost": None if self.operator is None else str(self.operator),
            "also": list(self.also),
        }


@dataclass(frozen=True)
class _Text:
    """A text without its marks. rows: of each line its rank and its words. joined: the words of all lines,
    with single spaces; starts: where each row begins in it."""

    rows: list[tuple[int | None, str]]
    joined: str
    starts: list[int]

    @classmethod
    def of(cls, text: str, width: int | None) -> _Text:
        """Read a text; lines of `width` characters continue in the next one, within a word perhaps."""
        rows: list[tuple[int | None, str]] = []
        goes_on = False
        for raw in text.splitlines():
            for rank, words in _without_marks(raw):
                if goes_on:
                    rows[-1] = (rows[-1][0], rows[-1][1] + words)
                else:
                    rows.append((rank, words))
                goes_on = len(raw) == width
        starts, parts, position = [], [], 0
        for _, words in rows:
            plain = " ".join(words.split())
            starts.append(position)
            parts.append(plain)
            position += len(plain) + bool(plain)
        return cls(rows, " ".join(filter(None, parts)), starts)

    def row_of(self, message: OomMessage) -> int:
        """Return the row in which a message begins."""
        return bisect_right(self.starts, message.position) - 1

    def before(self, message: OomMessage) -> str:
        """Return the traceback that ends at a message, with the message's own line; of its rank alone."""
        place = self.row_of(message)
        rank = self.rows[place][0]
        rows = self.rows[max(0, place - _LINES_BEFORE) : place + 1]
        text = "\n".join(words for at, words in rows if rank is None or at == rank)
        return text[max(0, text.rfind(_NEW_TRACEBACK)) :]


def _without_marks(raw: str) -> Iterator[tuple[int | None, str]]:
    """Yield the lines in one line of a log (JSON may hold several), each with the rank that marks it."""
    line = raw.strip()
    if line.startswith("{") and line.endswith("}") and len(line) < _LARGEST_JSON_LINE:
        try:
            content = parse_json(line, "line")
        except UnreadableError:
            content = None
        if isinstance(content, dict):
            stated = next(
                (content[name] for name in _SHAPES["ranks"] if isinstance(content.get(name), int)), None
            )
            for each in _texts(content):
                for part in each.splitlines():
                    rank, words = _unmarked(part)
                    yield stated if rank is None else rank, words
            return
    if _NEW_TRACEBACK + ":\\n" in raw:
        yield from (_unmarked(part) for part in raw.replace('\\"', '"').split("\\n"))
        return
    yield _unmarked(raw)


def _texts(content: dict[str, object]) -> Iterator[str]:
    """Yield the texts of a record of a log: tracebacks first, which end with the message."""
    for name in _SHAPES["texts"]:
        value = content.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _texts(value)
        elif isinstance(value, list):
            yield from (each for each in value if isinstance(each, str))


def _unmarked(line: str) -> tuple[int | None, str]:
    rank = None
    for _ in range(_MOST_MARKS):
        mark = _MARK.match(line)
        if mark is None:
            break
        number = mark["rank"] or mark["mpi"] or mark["named"]
        rank = rank if number is None else int(number)
        line = line[mark.end() :]
    return rank, line


def read_log(text: str) -> OomReport | None:
    """Return the first of a text's out-of-memory errors that say most; None if there is none."""
    plain = _COLOURS.sub("", text if len(text) < _READ_WHOLE else _around_hints(text))
    tried = [_Text.of(plain, None)]
    if (width := _width(plain)) is not None:
        tried.append(_Text.of(plain, width))
    read = [(each, find_messages(each.joined)) for each in tried]
    content, messages = max(
        read, key=lambda each: sum(1 + sum(x is not None for x in one.to_dict().values()) for one in each[1])
    )
    if not messages:
        return None
    best = max(message.weight for message in messages)
    alike = [message for message in messages if message.weight == best]
    message = next((each for each in alike[:_MOST_TRIED] if _frames(content.before(each))), alike[0])
    above = content.before(message)
    frames = _frames(above)
    marked = {
        message.rank if message.rank is not None else content.rows[content.row_of(message)][0]
        for message in messages
    }
    if message.source == "driver" and _names_pinned(above, frames, content.joined[message.position :][:400]):
        message = replace(message, source="pinned")
    return OomReport(
        message,
        len(messages),
        tuple(sorted(rank for rank in marked if rank is not None)),
        _phase(frames),
        next((frame for frame in reversed(frames) if frame.is_own), None),
        frames[-1] if frames else None,
        tuple(sorted({each.source for each in messages} - {message.source, "driver", "SIGKILL"})),
    )


def _around_hints(text: str) -> str:
    """Return the lines of a long log around those that may hold a message: the first and the last of them."""
    lines, kept, end = text.splitlines(), [], 0
    before, after = _LINES_AROUND
    for index, line in enumerate(text.lower().splitlines()):
        if any(hint in line for hint in _SHAPES["hints"]):
            kept += lines[max(end, index - before) : index + after]
            end = max(end, min(index + after, len(lines)))
    half = _MOST_LINES // 2
    return "\n".join(kept if len(kept) <= _MOST_LINES else kept[:half] + kept[-half:])


def _width(text: str) -> int | None:
    """Return the width at which a terminal may have folded the lines; None where none is long."""
    lengths = Counter(len(line) for line in text.splitlines() if len(line) >= _FOLDED_FROM)
    return max(lengths, key=lambda length: (lengths[length], length)) if lengths else None


def _frames(text: str) -> list[Frame]:
    """Return the frames of a traceback, outermost first."""
    joined = re.sub(r"\s+", " ", text)
    return [
        Frame(
            found["file"] or found["file2"],
            int(found["line"] or found["line2"]),
            (found["name"] or found["name2"]).strip(),
        )
        for found in _FRAME.finditer(joined)
    ]


def _phase(frames: list[Frame]) -> str | None:
    """Return the phase of the innermost frame that names one; backward may run forwards again."""
    words = [f"{frame.file} in {frame.name}" for frame in frames]
    for depth in reversed(range(len(words))):
        phase = next((phase for phase, pattern in _PHASES if pattern.search(words[depth])), None)
        if phase == "forward":
            for outer in reversed(words[:depth]):
                if _PHASES[0][1].search(outer):
                    break  # a closure that the optimizer runs
                if _RECOMPUTES.search(outer):
                    return "backward"
        if phase is not None:
            return phase
    return None


def _names_pinned(above: str, frames: list[Frame], after: str) -> bool:
    """Return whether a driver's error was of page-locked host memory: by the innermost call or C++ stack."""
    innermost = above[above.rfind("in " + frames[-1].name) :] if frames else above
    return bool(
        _PINNED.search(innermost) or _PINNED.search(after) or (frames and _PINNED.search(frames[-1].file))
    )
