"""Makes a program that fails small, and writes it as a script.

Smaller is: fewer operations, fewer blocks, more fields at their defaults. Each attempt runs on real ranks;
one that fails in another way than the original does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from differential.ranks.lockstep import Difference
from differential.specs import Program

Fails = Callable[[Program], str]
"""How a program fails, "" if it does not."""


def signature(program: Program, difference: Difference) -> str:
    """What two failures have in common if they are the same: operation, what is seen, kinds of values."""
    operation: Any = None
    if 0 <= difference.index < len(program.operations):
        operation = type(program.operations[difference.index]).__name__
    what = difference.name.split()[0]
    values = [_kind(text) for text in (difference.torch, difference.impl)]
    return f"{type(program.wrap).__name__} {operation} {what}: {values[0]} against {values[1]}"


def _kind(text: str) -> str:
    if what := re.match(r"\w*(Error|Exception)\b", text):
        return what.group()
    return re.sub(r"[-\d.,\[\]() ]+", " ", text)[:40].strip() or "nothing"


def shrink(program: Program, fails: Fails, most: int = 150) -> Program:
    """The smallest program that was found with ``most`` attempts at most."""
    attempts, progress = 0, True
    original = fails(program) if most else ""
    while progress and original:
        progress = False
        for smaller in _smaller(program):
            attempts += 1
            if attempts > most:
                return program
            if fails(smaller) == original:
                program, progress = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    operations = program.operations
    size = len(operations) // 2
    while size:
        for start in range(0, len(operations), size):
            yield replace(program, operations=operations[:start] + operations[start + size :])
        size //= 2
    for index in reversed(range(len(program.model.blocks))):
        if len(program.model.blocks) > 1 and not program.model.order:
            blocks = program.model.blocks
            yield replace(program, model=replace(program.model, blocks=blocks[:index] + blocks[index + 1 :]))
    for part in ("wrap", "model"):
        for simpler in _simpler(getattr(program, part), keep=("strategy", "originals", "blocks", "width")):
            yield replace(program, **{part: simpler})
    for index, block in enumerate(program.model.blocks):
        for simpler in _simpler(block):
            blocks = (*program.model.blocks[:index], simpler, *program.model.blocks[index + 1 :])
            yield replace(program, model=replace(program.model, blocks=blocks))
    for index, operation in enumerate(operations):
        for simpler in _simpler(operation, keep=("what", "name", "kind")):
            yield replace(program, operations=(*operations[:index], simpler, *operations[index + 1 :]))


def _simpler(value: Any, keep: tuple[str, ...] = ()) -> Iterator[Any]:
    """The same with one more field at its default."""
    for each in fields(value):
        if (
            each.name not in keep
            and each.default is not MISSING
            and getattr(value, each.name) != each.default
        ):
            yield replace(value, **{each.name: each.default})


SCRIPT = '''"""{title}

Run it with `python {name}`: it starts {ranks} ranks on gloo, runs the program on torch's FSDP and on ours,
and prints where they differ.
"""

import sys

sys.path[:0] = [{root!r}, {tests!r}]

from differential.around import *  # noqa: E402
from differential.operations import *  # noqa: E402
from differential.script import main  # noqa: E402
from differential.specs import *  # noqa: E402

PROGRAM = {program!r}

if __name__ == "__main__":
    main(PROGRAM)
'''


def write_script(program: Program, difference: Difference, path: Path) -> None:
    """A script that shows the difference again."""
    tests = Path(__file__).resolve().parents[1]
    text = SCRIPT.format(
        title=signature(program, difference),
        name=path.name,
        ranks=program.ranks,
        root=str(tests.parents[1]),
        tests=str(tests),
        program=program,
    )
    path.write_text(text)
