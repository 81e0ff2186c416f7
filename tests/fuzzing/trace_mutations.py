"""Changes of valid traces: some that mean nothing, some that lose or contradict, some of the bytes alone."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from trace_seeds import Document

Rewrite = Callable[[random.Random, Document], bytes]
HUGE = "1" * 5000


def text_of(document: Document) -> bytes:
    return json.dumps(document).encode()


def _key_order(rng: random.Random, document: Document) -> bytes:
    def shuffled(value: Any) -> Any:
        if isinstance(value, list):
            return [shuffled(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {key: shuffled(value[key]) for key in rng.sample(list(value), len(value))}

    return text_of(shuffled(document))


def _white_space(rng: random.Random, document: Document) -> bytes:
    gaps = rng.choice([" ", "\n", "\t \r\n"])
    return json.dumps(document, indent=rng.randrange(9), separators=("," + gaps, gaps + ":" + gaps)).encode()


def _members(rng: random.Random, document: Document) -> bytes:
    text = text_of(document)
    cuts = sorted(rng.randrange(len(text)) for _ in range(rng.randrange(1, 60)))
    parts = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return b"".join(gzip.compress(part, rng.randrange(10)) for part in parts) + bytes(rng.randrange(3) * 512)


def _other_events(rng: random.Random, document: Document) -> bytes:
    """Metadata, flows and events of Python frames between the others."""
    others = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 7, "pid": 1, "tid": 0, "ts": 1.5, "cat": "ac2g", "name": "ac2g"},
        {"ph": "X", "cat": "python_function", "name": "f", "pid": 1, "tid": 1, "ts": 1.5, "dur": 9.0},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "x",
            "ts": 1,
            "dur": 9,
        },
    ]
    events = document["traceEvents"]
    for _ in range(rng.randrange(1, 40)):
        events.insert(rng.randrange(len(events) + 1), deepcopy(rng.choice(others)))
    return text_of(document)


def _more_keys(rng: random.Random, document: Document) -> bytes:
    for event in document["traceEvents"]:
        if rng.random() < 0.5:
            event["extra"] = rng.choice(
                [None, [[1], {"ph": "X"}], '},{"ph": "X", "cat": "kernel"', "\\", 1e300]
            )
    return text_of({**document, "stackFrames": {"1": {"name": "}]"}}, "otherData": [None]})


def _events_first_or_last(rng: random.Random, document: Document) -> bytes:
    events = document.pop("traceEvents")
    if rng.random() < 0.5:
        return text_of({"traceEvents": events, **document})
    return text_of({**document, "traceEvents": events})


def _events_in_another_order(rng: random.Random, document: Document) -> bytes:
    rng.shuffle(document["traceEvents"])
    return text_of(document)


def _escapes(rng: random.Random, document: Document) -> bytes:
    """Letters of names as escapes; keys stay."""
    text = json.dumps(document)
    for word in ("FSDP", "ncclDevKernel", "gloo", "aten"):
        text = text.replace(f'"{word}', '"' + "".join(f"\\u{ord(letter):04x}" for letter in word))
    return text.encode()


def _mark_and_gzip(rng: random.Random, document: Document) -> bytes:
    text = b"\xef\xbb\xbf" + text_of(document)
    return gzip.compress(text) if rng.random() < 0.5 else text


def _numbers_as_text(rng: random.Random, document: Document) -> bytes:
    for event in document["traceEvents"]:
        if rng.random() < 0.3:
            event["ts"] = str(event["ts"])
    return text_of(document)


SAME: dict[str, Rewrite] = {
    each.__name__.strip("_"): each
    for each in (
        *(_key_order, _white_space, _members, _other_events, _more_keys, _events_first_or_last),
        *(_events_in_another_order, _escapes, _mark_and_gzip, _numbers_as_text),
    )
}
"""They change nothing of what a trace means."""

_BAD: dict[str, tuple[Any, ...]] = {
    "ph": (None, [], {}, "", "B", "E", "i", 7),
    "cat": (None, [], {}, "", 7),
    "name": (None, [], {}, "", 7, True),
    "ts": (None, [], {}, "", "x", "NaN", 1e300, -1e300, 2**63, 2**52, "HUGE", "NAN", "INF"),
    "dur": (None, [], {}, "", "x", "NaN", 1e300, -1e300, -5, 2**63, 2**40, "HUGE", "NAN", "INF"),
    "pid": (None, [], {}, 1.5, "HUGE", "NAN"),
    "tid": (None, [], {}, 1.5, "HUGE", "NAN"),
    "args": (None, [], "x", 7, True, "NAN"),
}
_BAD_ARGUMENT = (None, [], {}, "x", -1, 1e300, 2**63, 2**70, True, "HUGE", "NAN", "INF")


def broken(rng: random.Random, document: Document) -> tuple[str, bytes]:
    """One to three events lose a field, or get one that cannot be."""
    counting = [event for event in document["traceEvents"] if event["ph"] == "X"]
    told = []
    for event in rng.sample(counting, rng.randrange(1, 4)):
        field = rng.choice(list(_BAD))
        if field == "args" and isinstance(event.get("args"), dict) and event["args"] and rng.random() < 0.7:
            key = rng.choice(list(event["args"]))
            event["args"][key] = value = rng.choice(_BAD_ARGUMENT)
            told.append(f"{event['name']} args.{key}={value!r:.30}")
        elif rng.random() < 0.3:
            event.pop(field, None)
            told.append(f"{event.get('name')} without {field}")
        else:
            event[field] = value = rng.choice(_BAD[field])
            told.append(f"{event.get('name')} {field}={value!r:.30}")
    text = json.dumps(document)
    for name, literal in {"HUGE": HUGE, "NAN": "NaN", "INF": "-Infinity"}.items():
        text = text.replace(f'"{name}"', literal)
    return "; ".join(told), text.encode()


_ANY = (None, True, -1, 0, 2**70, 1e300, "", "x", [], {}, [[]], "\x1b[31m", "\u202e", "a\nb", "x" * 10_000)
_HEADS = ("distributedInfo", "deviceProperties", "fsdpbench", "schemaVersion", "traceName")
_IN_HEAD = ("rank", "world_size", "backend", "hardware", "links", "name", "model")


def anything(rng: random.Random, document: Document) -> tuple[str, bytes]:
    """Heads and fields of any kind, doubled events and keys, names that a terminal would obey."""
    events = document["traceEvents"]
    for _ in range(rng.randrange(1, 5)):
        event = rng.choice(events)
        choice = rng.randrange(6)
        if choice == 0:
            document[rng.choice(_HEADS)] = {rng.choice(_IN_HEAD): rng.choice(_ANY) for _ in range(3)}
        elif choice == 1:
            document[rng.choice(_HEADS)] = rng.choice(_ANY)
        elif choice == 2:
            events.insert(rng.randrange(len(events)), rng.choice([*_ANY, deepcopy(event)]))
        elif isinstance(event, dict) and choice == 3:
            event["name"] = rng.choice(
                ["\x1b]0;x\x07", "FSDP::all_gather (a\nb)", "ProfilerStep#9" * 9, "\x00", "é\u202e"]
            )
        elif isinstance(event, dict):
            event[rng.choice(list(_BAD))] = rng.choice(_ANY)
    text = text_of(document)
    if rng.random() < 0.2:
        text = text.replace(b'"dur": ', b'"dur": 5, "dur": ', rng.randrange(1, 9))
    if rng.random() < 0.1:
        text = text[:-1] + b', "traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1}]}'
    return "anything", text


def damaged(rng: random.Random, text: bytes) -> tuple[str, bytes]:
    """Bytes changed, lost or added anywhere."""
    at = rng.randrange(len(text))
    choice = rng.randrange(4)
    junk = rng.randbytes(rng.randrange(1, 12))
    if choice == 0:
        return f"cut at {at}", text[:at]
    if choice == 1:
        return f"{len(junk)} bytes changed at {at}", text[:at] + junk + text[at + len(junk) :]
    if choice == 2:
        return f"{len(junk)} bytes added at {at}", text[:at] + junk + text[at:]
    return f"bytes lost at {at}", text[:at] + text[at + len(junk) :]
