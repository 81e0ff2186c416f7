"""Stream bugs as people write them, each with its mend: what registers one, runs it, and judges the findings.

A bug is a function of `fixed`. Comments mark the two lines that nothing orders::

    @bug("race", "wait_stream")
    def side_stream_does_not_wait(fixed: bool) -> None:
        batch = torch.randn(8, 8, device="cuda")  # first
        with torch.cuda.stream(side):
            batch * 2  # second

Without the mend the sanitizer must report one finding of that kind whose sides are these lines (or lines that
they call), with a hint that names the way out. With it there must be none.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Program = Callable[[bool], None]


@dataclass(frozen=True)
class Bug:
    """One bug.

    ``hint``: a word that the hint has to hold. ``first`` and ``second``: the marked lines. ``allocator``: its
    settings.
    """

    name: str
    program: Program
    kind: str
    hint: str
    first: frozenset[str]
    second: frozenset[str]
    allocator: str = ""


BUGS: dict[str, Bug] = {}


def bug(kind: str, hint: str, *, allocator: str = "") -> Callable[[Program], Program]:
    """Register a function as a bug."""

    def register(program: Program) -> Program:
        lines, start = inspect.getsourcelines(program)
        file = Path(inspect.getsourcefile(program) or "").name
        places = {
            side: frozenset(f"{file}:{start + i}" for i, line in enumerate(lines) if f"# {side}" in line)
            for side in ("first", "second")
        }
        assert all(places.values()), f"{program.__name__}: both lines need a mark"
        assert len(lines) < 60, f"{program.__name__} is too long"
        name = f"{Path(file).stem}.{program.__name__}"
        BUGS[name] = Bug(name, program, kind, hint, **places, allocator=allocator)
        return program

    return register


CLEAN: dict[str, Callable[[], None]] = {}


def clean(program: Callable[[], None]) -> Callable[[], None]:
    """Register a program that has no bug."""
    CLEAN[program.__name__] = program
    return program


def load() -> dict[str, Bug]:
    """All bugs of the files in `bugs`."""
    sys.path.insert(0, str(HERE))
    for path in sorted((HERE / "bugs").glob("*.py")):
        importlib.import_module(f"bugs.{path.stem}")
    for name in ("clean_backward", "clean_programs"):
        importlib.import_module(name)
    return BUGS


def findings_of(program: Program, fixed: bool, allocator: str = "") -> list[dict[str, Any]]:
    """Run a program on a simulated GPU of eight; what the sanitizer finds."""
    import torch.distributed as dist

    from fsdpbench.script.cuda import map_cuda
    from fsdpbench.sim import Simulation, load_profile
    from fsdpbench.sim.model.allocator import AllocatorConf

    simulation = Simulation.start(
        load_profile("a100-80gb"),
        world_size=8,
        gpus_per_node=8,
        sanitize=True,
        allocator_conf=AllocatorConf.parse(allocator),
    )
    if not hasattr(findings_of, "mapped"):
        map_cuda(simulation)
        findings_of.mapped = True  # type: ignore[attr-defined]
        gc.freeze()  # torch itself, so that the collections below are quick
    dist.init_process_group("nccl", rank=0, world_size=8)
    try:
        program(fixed)
    finally:
        dist.destroy_process_group()
    assert simulation.sanitizer is not None
    found: list[dict[str, Any]] = simulation.sanitizer.to_dict()["findings"]
    gc.collect()
    return found


def judge(bug: Bug) -> list[str]:
    """What is wrong with the findings of a bug and its mend; nothing if all is right."""
    found = findings_of(bug.program, False, bug.allocator)
    wrong = []
    if not found:
        wrong.append(f"{bug.name}: missed")
    elif not any(_is_right(bug, finding) for finding in found):
        told = "; ".join(map(_told, found))
        expected = f"{bug.kind} {sorted(bug.first)} {sorted(bug.second)} {bug.hint!r}"
        wrong.append(f"{bug.name}: expected {expected}, found {told}")
    false = findings_of(bug.program, True, bug.allocator)
    if false:
        wrong.append(f"{bug.name}: the mended program still has {'; '.join(map(_told, false))}")
    return wrong


def _is_right(bug: Bug, finding: dict[str, Any]) -> bool:
    return (
        finding["kind"] == bug.kind
        and bug.hint in finding["hint"]
        and _is_at(finding["first"], bug.first)
        and _is_at(finding["second"], bug.second)
    )


def _is_at(access: dict[str, Any], lines: frozenset[str]) -> bool:
    places = [access["line"], *(frame.split(" ")[0] for frame in access["stack"])]
    return any(Path(place).name in lines for place in places)


def _told(finding: dict[str, Any]) -> str:
    first, second = (
        f"{finding[side]['operation']} {finding[side]['access']} {finding[side]['stream']} "
        f"{Path(finding[side]['line']).name}"
        for side in ("first", "second")
    )
    counted = f"{finding['bytes']} bytes x{finding['count']}"
    return f"{finding['kind']} [{first}] [{second}] {counted}: {finding['hint']}"


def judge_clean(name: str, program: Callable[[], None]) -> list[str]:
    """The false alarms of a program without a bug."""
    return [
        f"clean.{name}: false alarm {_told(finding)}" for finding in findings_of(lambda _: program(), True)
    ]


def run(*patterns: str) -> int:
    """Judge all bugs and clean programs whose names hold one of these words (default: all); prints what is
    wrong and the counts. Exit code."""

    def chosen(name: str) -> bool:
        return not patterns or any(pattern in name for pattern in patterns)

    judged = {name: functools.partial(judge, each) for name, each in load().items() if chosen(name)}
    bugs = len(judged)
    for name, program in CLEAN.items():
        if chosen(f"clean.{name}"):
            judged[f"clean.{name}"] = functools.partial(judge_clean, name, program)
    wrong = []
    for name, judgement in judged.items():
        try:
            wrong += judgement()
        except Exception:
            wrong.append(f"{name}: {traceback.format_exc(limit=-3)}")
    print("\n".join(wrong))
    print(f"{bugs} bugs and their mends, {len(judged) - bugs} clean programs, {len(wrong)} judged wrongly")
    return bool(wrong) or not judged


if __name__ == "__main__":
    import seeded  # the bugs register there, not in __main__

    sys.exit(seeded.run(*sys.argv[1:]))
