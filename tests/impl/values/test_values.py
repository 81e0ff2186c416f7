"""Wrapped models against the plain one, by value: outputs and callers of every kind, drawn orders, mutants.

Each program is equal to the plain model or raises; nothing is wrong without a word. The plain suite takes a
slice, ``VALUES_FILE=ci/measured/mutants_values.txt pytest -n 0 -m campaign tests/impl/values`` all of it,
``-k "orders and flat"`` a part, on some ways of wrapping.
"""

from __future__ import annotations

import os
import platform
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from values import verdicts
from values.delayed import late_collectives
from values.mutants import MUTANTS, QUICK_MUTANTS
from values.sequences import Net, drawn, program_of
from values.shapes import CALLERS, OUTPUTS, Model, training
from values.wraps import FLAT_WRAPS, QUICK_WRAPS, WRAPS, sharded

Finding = tuple[str, str, str]
"""What ran, its verdict, and the words of that."""
ITERATIONS = ("forward", "backward", "step", "no_grad", "step", "zero", "forward", "backward", "step")
HOWS = ("", "reentrant", "non-reentrant", "twice", "no stem")
OPTIMIZERS = ("", "foreach", "fused")
PIECE = 25
"""How many findings the ranks make at a time: what is lost where they hang."""
FROM_TORCH = {
    # Autograd reads the head's parameters, or all, before any code of FSDP runs: torch's own error is all.
    "no pre-backward of all", "no pre-backward of root", "no hooks on outputs of all",
    "no hooks on outputs of root", "pre-backward after post-backward", "no pre-forward of root",
}  # fmt: skip


def blocks_of(model: Any) -> list[nn.Module]:
    """What is wrapped besides the root."""
    return list(model.blocks)


def found_shapes(wrap: str, pairs: list[tuple[str, str, str]]) -> Iterator[Finding]:
    for pair in pairs:
        make = partial(Model, *pair)
        verdict = verdicts.compare(make, blocks_of, training, WRAPS[wrap], looks=False)
        yield f"{wrap}: returns {pair[0]}, caller {pair[1]} {pair[2]}", *verdict


def found_orders(wrap: str, numbers: Iterable[int]) -> Iterator[Finding]:
    hows = ("", "", "reentrant", "non-reentrant", "no_grad part")
    for number in numbers:
        names, how, optimizer = drawn(number), hows[number % 5], OPTIMIZERS[number % 3]
        if how == "no_grad part" and optimizer == "fused" and wrap in FLAT_WRAPS:
            # A flat parameter has zeros for the part without gradients, which would decay, as torch's does.
            optimizer = "fused, no decay"

        def verdict(names: tuple[str, ...], how: str = how, optimizer: str = optimizer) -> tuple[str, str]:
            program = program_of(names, optimizer)
            return verdicts.compare(lambda: Net(how), blocks_of, program, WRAPS[wrap], looks=False)

        found = verdict(names)
        if found[0] == verdicts.WRONG and "halve_data" in names:
            # No version shows a write in place through .data, to the plain model neither (docs/impl.md).
            seen = verdict(tuple("halve" if name == "halve_data" else name for name in names))
            found = (verdicts.UNSEEN, found[1]) if seen[0] != verdicts.WRONG else found
        if found[0] == verdicts.UNNAMED and "new_data" in names:
            # Of DTensors it is a write in place, which autograd refuses, on the plain model too.
            seen = verdict(tuple("halve" if name == "new_data" else name for name in names))
            found = seen if seen[0] == verdicts.BOTH_RAISE else found
        yield f"{wrap} {number} {how} {optimizer}: {' '.join(names)}", *found


def found_mutants(wrap: str, names: list[str]) -> Iterator[Finding]:
    plain = {
        looks: verdicts.plain_course(Net, program_of(ITERATIONS), looks)
        for looks in {name not in QUICK_MUTANTS for name in names}
    }
    for name in names:
        program, looks = verdicts.under(MUTANTS[name], program_of(ITERATIONS)), name not in QUICK_MUTANTS
        verdict = verdicts.compare(Net, blocks_of, program, WRAPS[wrap], looks=looks, theirs=plain[looks])
        yield f"{wrap}: {name}", *verdict


def case_findings(rank: int, *, part: str, wrap: str, chosen: list[object]) -> list[Finding]:
    parts = {"shapes": found_shapes, "orders": found_orders, "mutants": found_mutants}
    with warnings.catch_warnings(), late_collectives():
        warnings.simplefilter("ignore")
        return list(parts[part](wrap, chosen))  # type: ignore[operator]


def silent(findings: list[Finding]) -> list[str]:
    """What is wrong without a word, and errors that should name a unit."""
    bad = []
    for what, verdict, words in findings:
        unnamed = verdict == verdicts.UNNAMED and what.split(": ")[1] not in FROM_TORCH
        if verdict == verdicts.WRONG or unnamed:
            bad.append(f"{what}: {verdict}: {words}")
    return bad


QUICK = {
    "shapes": [("view", "add_", ""), ("view of two layers", "mul_", ""), ("object", "nothing", ""),
               ("stored last", "nothing", ""), ("parameter", "nothing", "")],
    "mutants": list(QUICK_MUTANTS),
}  # fmt: skip


@pytest.mark.parametrize("part", QUICK)
def test_nothing_is_wrong_without_a_word(two_ranks, part: str) -> None:
    verdict_of = {}
    for wrap in QUICK_WRAPS:
        findings = two_ranks.run(case_findings, part=part, wrap=wrap, chosen=QUICK[part])
        assert not silent(findings), "\n".join(silent(findings))
        verdict_of |= {what: verdict for what, verdict, _ in findings}
    if part == "shapes":
        assert verdict_of["sharded: returns view, caller add_ "] == verdicts.EQUAL
        assert verdict_of["flat: returns view of two layers, caller mul_ "] == verdicts.EQUAL
        assert verdict_of["sharded: returns parameter, caller nothing "] == verdicts.NAMED


def case_known_orders(rank: int) -> list[Finding]:
    """Each was wrong once."""
    orders = [
        ("sharded", "forward backward no_grad step no_grad"),
        ("sharded kept", "no_grad forward backward step no_grad step no_grad"),
        ("sharded", "forward backward step unshard step no_grad"),
        ("sharded", "forward backward unshard_later step no_grad"),
        ("flat", "forward new_data no_grad"),
        ("originals kept", "forward new_data no_grad"),
        ("flat", "frozen_forward"),
        ("flat", "forward backward zero thawed_by_a_hook step"),
        ("originals", "forward backward zero thawed_by_a_hook step"),
        ("originals kept", "frozen_forward"),
        ("unsharded", "frozen_forward"),
        ("sharded kept", "forward backward frozen_forward"),
        ("sharded", "forward step backward forward halve backward"),
    ]
    found = []
    with late_collectives():
        for wrap, names in orders:
            for optimizer in ("", "fused") if wrap == "sharded kept" else ("foreach",):
                program = program_of(tuple(names.split()), optimizer)
                verdict = verdicts.compare(Net, blocks_of, program, WRAPS[wrap], looks=False)
                found.append((f"{wrap}: {names} {optimizer}", *verdict))
    return found


def test_nothing_old_is_computed_with(two_ranks) -> None:
    findings = two_ranks.run(case_known_orders)
    assert not silent(findings), findings
    assert {verdict for _, verdict, _ in findings[:-1]} == {verdicts.EQUAL}, findings
    assert findings[-1][1] == verdicts.BOTH_RAISE, findings
    assert "were written to" in findings[-1][2], findings


def case_no_wait_at_all(rank: int) -> list[Finding]:
    with late_collectives(), patch("values.delayed.LateWork.wait", lambda self, *timeout: True):
        program = program_of(("forward",))
        return [("", *verdicts.compare(Net, blocks_of, program, WRAPS["sharded"]))]


def test_what_is_not_waited_for_is_seen(two_ranks) -> None:
    """The collectives of these tests are late enough for a lost wait to be seen at once, always."""
    assert two_ranks.run(case_no_wait_at_all)[0][1] == verdicts.WRONG


def chosen_shapes(number: int) -> list[tuple[str, str, str]]:
    """Each output with each caller, and of checkpointing and calls in a row a drawn part.

    Not a parameter out of a reentrant checkpoint: the plain model's backward calls itself without end there,
    as what is recomputed ends in the checkpoint's own node, and takes gigabytes on the way.
    """
    choice = random.Random(number)
    every = [(output, caller) for output in OUTPUTS for caller in CALLERS]
    drawn_pairs = [
        (*pair, HOWS[0] if choice.random() < 0.7 else choice.choice(HOWS))
        for pair in choice.sample(every, 200)
    ]
    return [each for each in drawn_pairs if each[0] != "parameter" or each[2] != "reentrant"]


def case_smaller_groups(rank: int) -> list[Finding]:
    wrap, names = sharded(2), "forward backward forward step no_grad forward forward step backward"
    with late_collectives():
        verdict = verdicts.compare(Net, blocks_of, program_of(tuple(names.split())), wrap, looks=False)
        return [(names, *verdict)]


@pytest.mark.campaign
def test_the_larger_shard_is_not_old(four_ranks) -> None:
    """``reshard_after_forward`` as a number: what a forward keeps is not used after a write."""
    assert not silent(four_ranks.run(case_smaller_groups))


def case_without_elements(rank: int) -> list[Finding]:
    """A rank that holds nothing of the parameters with gradients sees no step on them by itself."""
    names = ("sum_of_two", "forward", "sum_of_two", "forward", "step", "unshard", "step")
    with late_collectives():
        make, program = partial(Net, "no_grad part"), program_of(names, "fused")
        return [("", *verdicts.compare(make, blocks_of, program, WRAPS["originals"], looks=False))]


def test_ranks_without_elements_agree(two_ranks) -> None:
    findings = two_ranks.run(case_without_elements)
    assert [verdict for _, verdict, _ in findings] == [verdicts.EQUAL]


def in_pieces(pool: RankPool, part: str, number: int, wrap: str) -> Iterator[Finding]:
    """Run a part on one way of wrapping; ranks that hang are a finding, and the next piece has new ones."""
    chosen: dict[str, list[Any]] = {
        "shapes": chosen_shapes(number),
        "orders": list(range(1000 * number, 1000 * number + 100)),
        "mutants": list(MUTANTS) if wrap != "unsharded" else [],
    }
    for first in range(0, len(chosen[part]), PIECE):
        piece = chosen[part][first : first + PIECE]
        try:
            yield from pool.run(case_findings, timeout=240, part=part, wrap=wrap, chosen=piece)
        except AssertionError as error:
            yield f"{wrap}: {part} {piece[0]} to {piece[-1]}", verdicts.WRONG, f"ranks ended: {error}"


class Counts:
    """Verdicts by part and by mutant, and what is wrong or not as the plain model, of the tests that ran."""

    def __init__(self) -> None:
        self.parts: dict[str, Counter[str]] = {}
        self.wraps: Counter[str] = Counter()
        self.mutants: dict[str, Counter[str]] = {}
        self.lines: list[str] = []
        self.bad: list[str] = []

    def add(self, part: str, findings: list[Finding]) -> None:
        self.parts.setdefault(part, Counter()).update(verdict for _, verdict, _ in findings)
        self.wraps[part] += 1
        self.bad += silent(findings)
        for what, verdict, words in findings:
            if part == "mutants":
                self.mutants.setdefault(what.split(": ")[1], Counter())[verdict] += 1
            elif verdict in (verdicts.WRONG, verdicts.UNNAMED, verdicts.PASSES, verdicts.UNSEEN):
                self.lines.append(f"{what}: {verdict}: {words}")

    def __str__(self) -> str:
        counted = {
            f"{part}, {self.wraps[part]} of {len(WRAPS)} ways of wrapping": ", ".join(
                f"{number} {verdict}" for verdict, number in found.most_common()
            )
            for part, found in self.parts.items()
        }
        mutants = {
            name: ", ".join(f"{number} {verdict}" for verdict, number in found.items())
            for name, found in self.mutants.items()
        }
        return "\n".join([
            "pytest -n 0 -s -m campaign tests/impl/values",
            f"2 gloo ranks, Python {platform.python_version()}, torch {torch.__version__}",
            *(f"{what}: {found}" for what, found in counted.items()),
            f"wrong, or an error without a unit where FSDP's code ran: {len(self.bad)}",
            "Each mutant, and each program that is wrong, or raises without a unit's name or alone:",
            "",
            *(f"{name}: {found}" for name, found in mutants.items()),
            *self.lines,
            "",
        ])  # fmt: skip


@pytest.fixture(scope="module")
def counts() -> Iterator[Counts]:
    """Counts of all parts that were run, printed in the end, and written to the file ``VALUES_FILE``."""
    found = Counts()
    yield found
    print(found)
    if name := os.environ.get("VALUES_FILE"):
        Path(name).write_text(str(found), encoding="utf-8")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("part", ["mutants", "shapes", "orders"])
def test_all_of_it(two_ranks: RankPool, counts: Counts, part: str, wrap: str) -> None:
    findings = list(in_pieces(two_ranks, part, list(WRAPS).index(wrap), wrap))
    counts.add(part, findings)
    assert not silent(findings), "\n".join(silent(findings))
