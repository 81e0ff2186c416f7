"""A mutant is the function without one call; five of ours are reported. All of them: the campaign."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mutation_sites import Mutation, mutated, sites_of

SOURCE = """
class Group:
    def reduce(self, stream, tensor):
        stream.wait_stream(self.compute)
        event = stream.record_event()
        tensor.record_stream(stream)
        self.all_gather_state = AllGatherState(tensor, event)
        self._keep.append((tensor, event))
        self.all_gather_state = None
        return event, self.store.wait(1)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "group.py"
    path.write_text(SOURCE)
    return path


def test_sites_are_waits_records_and_holds(source: Path) -> None:
    found = [(site.mutation, site.text) for site in sites_of(source, "group.py")]
    assert found == [
        (Mutation.WAIT, "stream.wait_stream(self.compute)"),
        (Mutation.RECORD, "stream.record_event()"),
        (Mutation.RECORD_STREAM, "tensor.record_stream(stream)"),
        (Mutation.HOLD, "self.all_gather_state = AllGatherState(tensor, event)"),
        (Mutation.HOLD, "AllGatherState(tensor, event)"),
        (Mutation.WAIT, "self.store.wait(1)"),
    ]


def test_a_key_has_no_line(source: Path) -> None:
    before = [site.key for site in sites_of(source, "group.py")]
    source.write_text("# a comment\n" + SOURCE)
    assert [site.key for site in sites_of(source, "group.py")] == before
    assert before[0] == "group.py Group.reduce: stream.wait_stream(self.compute)"


def test_a_mutant_lacks_one_call_and_does_the_rest(source: Path) -> None:
    calls: list[str] = []

    def called(name: str) -> object:
        return lambda *_: calls.append(name) or name

    def removed(kind: str, *values: object) -> object:
        calls.append(f"without {kind}")
        return values[-1] if kind == "receiver" else None

    def run(tree: ast.Module) -> list[str]:
        scope = {
            "_removed": removed,
            "AllGatherState": lambda *held: calls.append("held" if held[0] else "-"),
        }
        exec(compile(tree, "group.py", "exec"), scope)
        group = scope["Group"]()
        group.compute, group._keep, group.store = 0, [], SimpleNamespace(wait=called("store"))
        stream = SimpleNamespace(wait_stream=called("wait"), record_event=called("record"))
        calls.clear()
        group.reduce(stream, SimpleNamespace(record_stream=called("record_stream")))
        return list(calls)

    runs = [run(mutated(source, site)) for site in sites_of(source, "group.py")]
    whole = ["wait", "record", "record_stream", "held", "store"]
    assert runs == [
        ["without wait", *whole[1:]],
        ["wait", "without event", *whole[2:]],
        ["wait", "record", "without record_stream", "held", "store"],
        [*whole[:4], "without None", "store"],
        ["wait", "record", "record_stream", "without None", "-", "store"],
        [*whole[:4], "without receiver"],
    ]


REPORTED: list[tuple[str, str, dict[str, Any]]] = [
    ("runtime/context.py Context.let_gathers_wait: streams.all_gather.wait(event)", "race", {}),
    (
        "runtime/gather.py Gather.finish: context.streams.compute.wait(self.event)",
        "race",
        {},
    ),
    (
        "runtime/buffer.py Handover.release: reader.keep(buffer.tensor)",
        "use_after_free",
        {"memory_handover": "record_stream"},
    ),
    (
        "runtime/buffer.py Handover.release: self.held.append((buffer, reader.record()))",
        "use_after_free",
        {},
    ),
    (
        "runtime/lent.py GradientReturns.finish: event.synchronize()",
        "read_before_ready",
        {"offload": True},
    ),
]


@pytest.mark.simulated
def test_five_of_ours_are_reported() -> None:
    import mutant_runs
    import mutants
    import trained_models
    import training_programs as programs

    mutant_runs.prepare()
    sites = {site.key: (module, site) for module, site in mutants.all_sites("impl")}
    for key, kind, arguments in REPORTED:
        module, site = sites[f"impl/{key}"]
        case = trained_models.Case("impl-fsdp2", programs.train, arguments)
        outcome = mutant_runs.run_mutant(module, site, [case])
        assert outcome.reached, key
        assert outcome.kinds.get(kind), (key, outcome)
