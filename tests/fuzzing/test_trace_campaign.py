"""Traces of every kind of wrong: analysed, doubted or refused; never a traceback, a hang or a silent figure.

`pytest -n 0 -s -m campaign tests/fuzzing/test_trace_campaign.py` prints `ci/measured/fuzz_traces.txt`.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import trace_seeds
from forked_commands import CommandServer, Outcome, violations
from trace_bombs import Bomb, bombs
from trace_mutations import SAME, anything, broken, damaged, text_of
from trace_seeds import Document

from fsdpbench.reports.readers import TraceLimits

BROKEN, ANYTHING, DAMAGED, PACKED = 35, 20, 10, 10
"""Cases a seed."""
MEMORY_AN_EVENT = 500
MEMORY_A_BYTE_OF_AN_EVENT = 24
MEMORY_AT_LEAST = 150 << 20
SEEDS: dict[str, Callable[[], list[Document]]] = {
    "gpu": trace_seeds.gpu,
    "cpu": trace_seeds.cpu,
    "several ranks": trace_seeds.several_ranks,
}


class Campaign:
    """Runs cases and collects what is wrong."""

    def __init__(self, commands: CommandServer, folder: Path) -> None:
        self._commands = commands
        self._folder = folder
        self.tried: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.failed: list[str] = []
        self.slowest = self.greatest = 0.0
        self.base_bytes = 0

    def analyze(self, kind: str, path: Path, *options: str, as_json: bool = True) -> Outcome:
        """The outcome of one case, held against what every case must keep."""
        argv = ["analyze", str(path), *options, *(["--json"] if as_json else [])]
        outcome = self._commands.run_case(argv, self._folder)
        self.tried[kind] += 1
        self.ends[f"exit {outcome.code}"] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        if self.base_bytes:
            self.greatest = max(self.greatest, outcome.peak_bytes - self.base_bytes)
        for violation in violations(outcome):
            self.fail(kind, f"{violation}: {outcome}")
        return outcome

    def fail(self, kind: str, told: str) -> None:
        self.failed.append(f"{kind}: {told[:1500]}")

    def told(self) -> str:
        lines = [f"{count} {kind}" for kind, count in self.tried.items()]
        ends = ", ".join(f"{count} with {end}" for end, count in sorted(self.ends.items()))
        lines.append(f"{self.tried.total()} cases tried, {len(self.failed)} failed; {ends}")
        lines.append(
            f"slowest {self.slowest:.1f} s, at most {self.greatest / 2**20:.0f} MiB more than a small trace"
        )
        return "\n".join(lines)


@pytest.fixture(scope="module")
def campaign(commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    made = Campaign(commands, tmp_path_factory.mktemp("traces"))
    yield made
    print("\n" + made.told())


@pytest.fixture(scope="module", params=[*SEEDS, "simulated"])
def seed(request: Any, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """A valid trace for each rank."""
    if request.param in SEEDS:
        return SEEDS[request.param]()
    folder = tmp_path_factory.mktemp("simulated")
    argv = "run --model gpt-tiny --gpus 2 --device sim --batch 1 --seq 64 -o runs".split()  # noqa: SIM905
    outcome = commands.run_case(argv, folder)
    assert outcome.code == 0, outcome
    (path,) = folder.rglob("rank0_trace.json.gz")
    return [json.loads(gzip.decompress(path.read_bytes()))]


def write(folder: Path, documents: list[Document], first: bytes) -> Path:
    """The traces of all ranks, the first one's as given."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, document in enumerate(documents):
        (folder / f"rank{rank}_trace.json").write_bytes(first if rank == 0 else text_of(document))
    return folder


def figures(outcome: Outcome) -> Any:
    """All that was printed but notes on what did no harm."""
    content = json.loads(outcome.out)
    for rank in content["ranks"]:
        del rank["trace"], rank["warnings"]
    return content


def overlap(outcome: Outcome) -> Any:
    return [
        (rank["overlap_fraction"], rank["time_s"], [step["time_s"] for step in rank["steps"]])
        for rank in json.loads(outcome.out)["ranks"]
    ]


def warnings(outcome: Outcome) -> set[str]:
    return {warning for rank in json.loads(outcome.out)["ranks"] for warning in rank["warnings"]}


def trusted(outcome: Outcome) -> bool:
    content = json.loads(outcome.out)
    across = content["across_ranks"]
    return all(rank["trusted"] for rank in content["ranks"]) and across.get("trusted", True)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_changes_of_valid_traces(campaign: Campaign, seed: list[Document], tmp_path: Path) -> None:
    rng = random.Random(13)
    original = campaign.analyze("seeds", write(tmp_path / "seed", seed, text_of(seed[0])))
    assert original.code == 0, original
    campaign.base_bytes = original.peak_bytes
    for name, rewrite in SAME.items():
        for number in range(2):
            path = write(tmp_path / f"{name}{number}", seed, rewrite(rng, deepcopy(seed[0])))
            outcome = campaign.analyze("changes that mean nothing", path)
            if outcome.code != 0 or figures(outcome) != figures(original):
                campaign.fail("changes that mean nothing", f"{name}: other figures: {outcome}")
    for number in range(BROKEN):
        told, text = broken(rng, deepcopy(seed[0]))
        path = write(tmp_path / f"broken{number}", seed, text)
        check_broken(campaign, original, told, path)
    for number in range(ANYTHING):
        _, text = anything(rng, deepcopy(seed[0]))
        path = write(tmp_path / f"anything{number}", seed, text)
        campaign.analyze("fields, heads and names of any kind", path, as_json=number % 2 == 0)
    for number in range(DAMAGED):
        _, text = damaged(rng, text_of(seed[0]))
        path = write(tmp_path / f"damaged{number}", seed, text)
        campaign.analyze("bytes of JSON", path, as_json=number % 2 == 0)
    for number in range(PACKED):
        told, text = damaged(rng, gzip.compress(text_of(seed[0])))
        path = write(tmp_path / f"packed{number}", seed, text)
        check_packed(campaign, original, told, path)
    assert not campaign.failed, "\n".join(campaign.failed)


def check_broken(campaign: Campaign, original: Outcome, told: str, path: Path) -> None:
    """Figures are the same, or not trusted; without an argument they are, or a warning says so."""
    kind = "fields that are missing or cannot be"
    outcome = campaign.analyze(kind, path)
    if outcome.code != 0 or not trusted(outcome) or overlap(outcome) == overlap(original):
        return
    if "args" not in told or warnings(outcome) <= warnings(original):
        campaign.fail(kind, f"{told}: trusted, and other figures: {warnings(outcome)}")


def check_packed(campaign: Campaign, original: Outcome, told: str, path: Path) -> None:
    """Gzip has a checksum: the same figures, or a refusal."""
    outcome = campaign.analyze("bytes of gzip", path)
    if outcome.code == 0 and trusted(outcome) and overlap(outcome) != overlap(original):
        several = len(json.loads(original.out)["ranks"]) > 1
        left_out = json.loads(outcome.out)["problems"]
        if not (several and left_out):
            campaign.fail("bytes of gzip", f"{told}: other figures")


@pytest.mark.campaign
@pytest.mark.parametrize("bomb", list(bombs()), ids=lambda bomb: bomb.name)
def test_files_that_ask_for_much(campaign: Campaign, tmp_path: Path, bomb: Bomb) -> None:
    before = len(campaign.failed)
    if not campaign.base_bytes:
        small = write(tmp_path / "small", trace_seeds.gpu(), text_of(trace_seeds.gpu()[0]))
        campaign.base_bytes = campaign.analyze("seeds", small).peak_bytes
    (tmp_path / "bomb").mkdir()
    outcome = campaign.analyze("bombs", bomb.write(tmp_path / "bomb"), *bomb.options)
    if bomb.words and (outcome.code != 2 or bomb.words not in outcome.err):
        campaign.fail("bombs", f"{bomb.name} is not refused by {bomb.words}: {outcome}")
    limits = TraceLimits().with_texts(bomb.options[1:])
    # Read up to a million events here, whatever the limit allows.
    most = MEMORY_AN_EVENT * min(limits.events, 10**6) + MEMORY_A_BYTE_OF_AN_EVENT * limits.event
    if outcome.peak_bytes - campaign.base_bytes > most + MEMORY_AT_LEAST:
        campaign.fail(
            "bombs", f"{bomb.name} took {(outcome.peak_bytes - campaign.base_bytes) / 2**20:.0f} MiB"
        )
    assert not campaign.failed[before:], "\n".join(campaign.failed[before:])
