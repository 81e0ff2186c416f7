"""Valid TOML and JSON files, damaged: in their values, their structure, their bytes."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from pathlib import Path
from typing import Any

from hostile import BYTES, TEXTS

from fsdpbench.base.files.documents import to_toml

VALUES: tuple[Any, ...] = (
    *TEXTS, None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 0.5, -0.5, 1e308,
    float("nan"), float("inf"), float("-inf"), [], [[]], [1, "a"], [None], {}, {"a": 1}, {"match": {}},
    [[[[[[]]]]]], "x" * 1_000_000,
)  # fmt: skip
KEYS = (
    "modle",
    "",
    "a b",
    "\x1b[31m",
    "gpus",
    "model",
    "step_time_s",
    "x" * 10_000,
    "ä",
    "\n",
    "__class__",
    "batch",
)


def damaged(path: Path, random_: random.Random) -> bytes:
    """The content of a valid file with something wrong in it."""
    content = path.read_bytes()
    if random_.random() < 0.35:
        return _bytes_damaged(content, random_)
    is_toml = path.suffix == ".toml"
    tree: Any = tomllib.loads(content.decode()) if is_toml else json.loads(content)
    for _ in range(random_.choice((1, 1, 2, 4))):
        tree = _tree_damaged(tree, random_)
    try:
        text = to_toml(tree) if is_toml else json.dumps(tree)
    except (TypeError, ValueError, AttributeError):  # TOML has no null
        return _bytes_damaged(content, random_)
    return text.encode("utf-8", errors="surrogatepass")


def _tree_damaged(tree: Any, random_: random.Random) -> Any:
    """Something at a random place replaced, left out, renamed or added."""
    places = list(_places(tree))
    if not places:
        return copy.deepcopy(random_.choice(VALUES))
    holder, key = random_.choice(places)
    what = random_.random()
    if what < 0.6:
        holder[key] = copy.deepcopy(random_.choice(VALUES))
    elif what < 0.75:
        del holder[key]
    elif isinstance(holder, dict):
        holder[random_.choice(KEYS)] = (
            holder.pop(key) if what < 0.9 else copy.deepcopy(random_.choice(VALUES))
        )
    else:
        holder.append(copy.deepcopy(random_.choice(VALUES)))
    return tree


def _places(node: Any) -> Any:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from _places(value)


def _bytes_damaged(content: bytes, random_: random.Random) -> bytes:
    start = random_.randrange(len(content) + 1)
    end = min(len(content), start + random_.choice((0, 0, 1, 5, 100)))
    if random_.random() < 0.15:
        return content[:start]
    return content[:start] + random_.choice(BYTES) + content[end:]
