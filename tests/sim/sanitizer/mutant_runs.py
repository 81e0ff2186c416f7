"""Runs mutants, each in a fork of a process that has everything loaded; says what the sanitizer reported.

First each program runs once with all sites watched: a mutant then runs only programs that come to its site,
and no further than the first that is reported.

    this process ── fork ──> all programs, watched        ──> which program comes to which site
                 ── fork ──> one mutant, those programs   ──> the first finding, or none
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mutants
import torch
import trained_models
from mutation_sites import Site
from trained_models import Case

_LONGEST_S = 600.0


@dataclass
class Outcome:
    """What became of one mutant. ``programs``: how many come to its site; ``case``: the one that was
    reported, or that raised ``error``."""

    module: str
    site: Site
    programs: int
    kinds: dict[str, int] = field(default_factory=dict)
    case: str = ""
    first: str = ""
    error: str = ""
    reached: int = 0

    @property
    def is_reported(self) -> bool:
        """By the sanitizer."""
        return bool(self.kinds)


def programs_by_site(sites: Sequence[tuple[str, Site]], cases: Sequence[Case]) -> dict[int, list[int]]:
    """By number of a site: the numbers of the programs that come to it. Raises if one of them is reported."""

    def watched() -> Any:
        mutants.watch(sites)
        found: dict[int, list[int]] = {index: [] for index in range(len(sites))}
        for number, case in enumerate(cases):
            mutants.seen.clear()
            told = trained_models.run(case)
            if told["findings"]:
                raise AssertionError(f"{case.name} is reported without a mutation: {told['findings'][0]}")
            for index in mutants.seen:
                found[index].append(number)
        return list(found.items())

    return dict(in_fork(watched))


def run_mutant(module: str, site: Site, cases: Sequence[Case]) -> Outcome:
    """Take a site out and run programs until one is reported or fails."""

    def mutant() -> Any:
        mutants.put_in_place(module, site)
        told: dict[str, Any] = {}
        for case in cases:
            try:
                result = trained_models.run(case)
            except Exception as error:
                return {"case": case.name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
            if result["findings"]:
                kinds = {kind: count for kind, count in result["counts"].items() if count}
                told = {"case": case.name, "kinds": kinds, "first": _line(result["findings"][0])}
                break
        return {**told, "reached": mutants.reached()}

    return Outcome(module, site, len(cases), **in_fork(mutant))


def run_all(owner: str, cases: Sequence[Case], only: str = "") -> Iterator[Outcome]:
    """All mutants of one owner's code (of those whose key has ``only`` in it), one after another."""
    sites = [each for each in mutants.all_sites(owner) if only in each[1].key]
    by_site = programs_by_site(sites, cases)
    for index, (module, site) in enumerate(sites):
        yield run_mutant(module, site, [cases[number] for number in by_site[index]])


def prepare() -> None:
    """Load in this process what its forks need, the device first: ours looks up methods when it is imported.

    What torch imports at a first forward and a first step is imported here. No backward: autograd would not
    fork after it.
    """
    torch.set_num_threads(1)
    with trained_models.simulated():
        for modules in mutants.MODULES.values():
            for name in modules:
                mutants.load(name)
        model = trained_models.build("impl-fsdp2", {})
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        trained_models.optimizer_of(model).step()
        with torch.no_grad():
            model(torch.zeros(1, trained_models.WIDTH, device="sim"))


def told(outcome: Outcome, reasons: Mapping[str, str]) -> str:
    """A line of the table: the place, what was taken out, and what was said or why nothing had to be."""
    site = outcome.site
    place = f"{site.file}:{site.line} {site.function}: {site.mutation.value} {site.text}"
    if outcome.error:
        what = f"error: {outcome.error} ({outcome.case})"
    elif outcome.is_reported:
        kinds = ", ".join(f"{kind} {count}" for kind, count in outcome.kinds.items())
        what = f"{kinds}: {outcome.first} ({outcome.case})"
    else:
        reason = reasons.get(site.key, "MISSED")
        what = f"not reported by {outcome.programs} programs: {reason}"
    return f"{place}\n    {what}"


def _line(finding: dict[str, Any]) -> str:
    first, second = finding["first"], finding["second"]
    return (
        f"{first['operation']} {first['access']} on {first['stream']}, "
        f"{second['operation']} {second['access']} on {second['stream']}"
    )


def in_fork(work: Callable[[], Any], limit_s: float = _LONGEST_S) -> Any:
    """What a function returns (JSON) in a child of this process. Raises RuntimeError if it raises, dies or is
    not over after ``limit_s`` seconds."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer = {"told": work()}
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        if not select.select([pipe], [], [], limit_s)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise RuntimeError(f"not over after {limit_s} s")
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if not content:
        raise RuntimeError(f"the process ended with status {status} and said nothing")
    answer = json.loads(content)
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return answer["told"]
