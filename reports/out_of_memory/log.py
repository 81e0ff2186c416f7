"""A log with an out-of-memory error in it: the message, the rank, and by the traceback the phase and
the script's line."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fsdpbench.reports.out_of_memory.message import OomMessage, find_messages

_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>[0-9]{1,9}), in (?P<name>[^\n]+)')
_RANK = re.compile(r"^\s*(?:\[(?:default|rank)(?P<rank>[0-9]{1,9})\]\s*:?)")
_NEW_TRACEBACK = "Traceback (most recent call last)"
_INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")
_PHASES = (
    ("optimizer", re.compile(r"/torch/optim/|in step\b")),
    (
        "backward",
        re.compile(r"/torch/autograd/(?:__init__|graph)\.py|/torch/_tensor\.py|in backward\b|post_backward"),
    ),
    ("checkpoint loading", re.compile(r"in (load_state_dict|_load_state_dict|load)\b")),
    ("moving the model to the GPU", re.compile(r"in (to|cuda|_apply|convert)\b")),
    ("forward", re.compile(r"in (forward|_call_impl)\b")),
)
_MODULE_FILES = re.compile(r"/torch/nn/modules/(\w+)\.py")


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    name: str

    @property
    def is_own(self) -> bool:
        """Whether it is the user's, not an installed package's."""
        return not any(part in self.file for part in _INSTALLED)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class OomReport:
    """What a text says about an out-of-memory error; None is what it does not say.

    ranks: those whose log holds such a message. where: the innermost line of the user's own program.
    operator: the innermost frame of all.
    """

    message: OomMessage
    count: int
    ranks: tuple[int, ...]
    phase: str | None
    where: Frame | None
    operator: Frame | None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "message": self.message.to_dict(),
            "messages": self.count,
            "ranks": list(self.ranks),
            "phase": self.phase,
            "line": None if self.where is None else str(self.where),
            "innermost": None if self.operator is None else str(self.operator),
        }


def read_log(text: str) -> OomReport | None:
    """The first out-of-memory error of a text that says most; None if there is none."""
    messages = find_messages(text)
    if not messages:
        return None
    message = max(messages, key=lambda each: (each.asked is not None, each.total is not None))
    lines = text.splitlines()
    place = next((i for i, line in enumerate(lines) if _says(line, lines, i)), len(lines))
    frames = _frames_before(lines, place)
    return OomReport(
        message,
        len(messages),
        _ranks(lines),
        _phase(frames, lines[max(0, place - 1) : place + 1]),
        next((frame for frame in reversed(frames) if frame.is_own), None),
        frames[-1] if frames else None,
    )


def _says(line: str, lines: list[str], index: int) -> bool:
    low = line.lower()
    told = any(word in low for word in ("memory", "alloc", "oom", "kill"))
    return told and bool(find_messages(" ".join(lines[index : index + 2])))


def _frames_before(lines: list[str], place: int) -> list[Frame]:
    """The frames of the traceback that ends at a line, outermost first; of one rank where ranks are mixed."""
    marked = _RANK.match(lines[place]) if place < len(lines) else None
    rank = marked["rank"] if marked else None
    frames: list[Frame] = []
    for line in reversed(lines[:place]):
        found = _RANK.match(line)
        if rank is not None and (found is None or found["rank"] != rank):
            continue
        if _NEW_TRACEBACK in line:
            break
        if frame := _FRAME.search(line):
            frames.append(Frame(frame["file"], int(frame["line"]), frame["name"].strip()))
    return frames[::-1]


def _phase(frames: list[Frame], around: list[str]) -> str | None:
    """The phase of the first frame, from the innermost on, that names one; backward runs forwards again."""
    words = [f"{frame.file} in {frame.name}" for frame in frames]
    for phase in ("optimizer", "backward"):
        pattern = dict(_PHASES)[phase]
        if any(pattern.search(word) for word in words):
            return phase
    for word in reversed(words):
        for phase, pattern in _PHASES[2:]:
            if pattern.search(word) or (phase == "forward" and _MODULE_FILES.search(word)):
                return phase
    return None


def _ranks(lines: list[str]) -> tuple[int, ...]:
    found: Counter[int] = Counter()
    for index, line in enumerate(lines):
        rank = _RANK.match(line)
        if rank and _says(line, lines, index):
            found[int(rank["rank"])] += 1
    return tuple(sorted(found))
