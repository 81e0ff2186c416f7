"""One difference of two simulated configurations has one interval, whichever command is asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fsdpbench.answers.advise import advise_script, advisor
from fsdpbench.answers.tune import front
from fsdpbench.answers.tune.per_unit import Chosen
from fsdpbench.answers.tune.unit_gain import UnitGain, gained
from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.results.store import Store, point_folder_name
from fsdpbench.reports.pages.ranking import cost_of, pair, paired, rank
from fsdpbench.reports.pages.view import load_run
from fsdpbench.reports.result import Result
from fsdpbench.sweep.planning import configured, make_target
from fsdpbench.sweep.prediction import Prediction, forecast
from fsdpbench.sweep.runner import run_sweep
from fsdpbench.sweep.trials import Progress, Trial

from .test_candidates import SEEN

Settings = Mapping[str, object]
FEW: Sequence[Settings] = [{}, {"activation_offload": True}]
MORE: Sequence[Settings] = [
    *FEW,
    {"activation_checkpointing": "op"},
    {"linear_dtype": "fp8"},
    {"activation_offload": "true:1+false:1", "activation_checkpointing": "full:1+none:1"},
    {"cpu_offload": True},
    {"compile": True},
    {"tp": 2},
    {"optimizer": "muon"},
    {"loss": "chunked"},
    {"strategy": "SHARD_GRAD_OP"},
    {"param_dtype": "fp32"},
]
GOAL = front.Goal("tokens_per_s")
Interval = tuple[float, float, float]


def of_page(folder: Path, one: Config, other: Config) -> Interval:
    """What a sweep's table, its page and its three lines say of two configurations."""
    rows = {entry.row.folder.name: entry for entry in rank(load_run(folder))}
    found = paired(rows[point_folder_name(one)], rows[point_folder_name(other)])
    return found.change, found.low, found.high


def of_plan(one: Prediction, other: Prediction) -> Interval:
    found = pair(*(cost_of(each.throughput or 0.0, each.interval) for each in (one, other)))
    return found.change, found.low, found.high


def of_tune(folder: Path, one: front.Candidate, other: front.Candidate, *, full: bool) -> Interval:
    chosen = Chosen(other, one, 1, 1 << 40)
    found = (gained(folder, chosen) if full else UnitGain.of(chosen)).gain
    assert found is not None
    return found.change, found.low, found.high


def of_advice(monkeypatch: pytest.MonkeyPatch, one: Trial, other: Trial) -> Interval:
    monkeypatch.setattr(advisor, "simulate", lambda configs, jobs, tell: [one] * len(configs))
    monkeypatch.setattr(advisor, "by_unit", lambda *_: [])
    result = {**other.result.to_dict(), "script": {"observed": SEEN}}
    advice = advise_script(other.config, Result.of(result), 1, lambda line: None)
    every = (*advice.advice, *advice.possible, *advice.no_effect, *advice.nothing)
    found = next(each for each in every if each.candidate.variation == "keep")
    assert found.paired is not None
    return found.paired.change, found.paired.low, found.paired.high


def asked(folder: Path, monkeypatch: pytest.MonkeyPatch, several: Sequence[Settings]) -> None:
    target = make_target(model="gpt-tiny", gpus=8, hardware="h100-80gb", shape={"layers": 2})
    configs = [configured(target, "torch-fsdp2", **settings) for settings in several]
    store = Store(folder)
    store.write_space({}, configs)
    run_sweep(store, configs, Progress(), jobs=1)
    predictions = forecast(configs, 1, lambda done: None).predictions
    candidates = [front.judged(store, config, GOAL) for config in configs]
    trials = [Trial(config, store.runs(config)[0]) for config in configs]
    assert all(each.feasible for each in candidates)
    for one, other in itertools.permutations(range(len(configs)), 2):
        wanted = pytest.approx(of_page(folder, configs[one], configs[other]))
        assert of_plan(predictions[one], predictions[other]) == wanted
        assert of_tune(folder, candidates[one], candidates[other], full=False) == wanted
        if "tp" not in {**several[one], **several[other]}:  # whose steps do less each
            assert of_advice(monkeypatch, trials[one], trials[other]) == wanted
    assert of_tune(folder, candidates[1], candidates[0], full=True) == pytest.approx(
        of_page(folder, configs[1], configs[0])
    )


def test_every_command_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(tmp_path, monkeypatch, FEW)


@pytest.mark.campaign
def test_every_command_gives_the_same_of_any_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(tmp_path, monkeypatch, MORE)
