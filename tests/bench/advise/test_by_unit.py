"""The choice by unit in a script: its diff is what was simulated, and trains as the script does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fsdpbench.answers.advise import advise_script, advisor, fitting_mix
from fsdpbench.answers.advise.by_unit import by_unit, written
from fsdpbench.answers.advise.candidates import Candidate
from fsdpbench.answers.advise.edits import NoDiffError, diff_of
from fsdpbench.answers.advise.text import describe_fitting, entry
from fsdpbench.answers.prove.real_runs import run_ranks
from fsdpbench.base.configuration.config import Config, WhatIf
from fsdpbench.base.result_sections import ObservedModel, ObservedScript, Place, RepeatedBlocks, ShardingCall
from fsdpbench.base.settings.values import spread
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.reports.result import Result
from fsdpbench.script.real_ranks.rank import Task, Way
from fsdpbench.sweep.prediction import usable_bytes
from fsdpbench.sweep.trials import Trial

from .conftest import Run
from .test_candidates import SEEN
from .trained import script

MIXED = "by-unit=full:3,none:5/false:1,true:1,false:2,true:1,false:3"
RESHARDED = f"{MIXED}/true:6,false:2"
GIB = 2**30

_FUNCTIONS = {
    "for block in self.blocks:\n            x = block(x)": "for block in self.blocks:\n"
    "            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    "import contextlib": "import contextlib, torch.utils.checkpoint",
    "for block in model.blocks:\n    fully_shard(block, mp_policy=policy)\n"
    "fully_shard(model, mp_policy=policy)": """
class Training:
    def __init__(self, model):
        self.model = model
    def shard(self, **given):
        layers = self.model.blocks
        for index in range(0, len(layers), 2):
            for block in layers[index : index + 2]:
                fully_shard(block, reshard_after_forward=True, **given)
        fully_shard(self.model, **given)
Training(model).shard(mp_policy=policy)""",
}
"""A script whose forward recomputes and whose class wraps."""


_WEIGHTS = """for number, each in enumerate(model.parameters(), 1):
    local = each.data.to_local() if hasattr(each, "to_local") else each.data
    local.copy_(0.1 * torch.sin(number * torch.arange(local.numel())).view_as(local))
"""


_SAVED = {"loss = F": "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n        loss = F"}
"""A script that saves on the host what is saved for backward."""
_STAGES = {
    "self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))": "self.stages = nn.ModuleList("
    'nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(LAYERS // 2))}) for _ in range(2))',
    "for block in self.blocks": 'for block in [each for stage in self.stages for each in stage["blocks"]]',
    "for block in model.blocks": 'for block in [each for stage in model.stages for each in stage["blocks"]]',
}
"""A script whose blocks are in stages."""
_CHANGED = {"functions": _FUNCTIONS, "saved": _SAVED, "stages": _STAGES}


def text(style: str, size: str = "8, 2048, 2048, 8") -> str:
    found = script("fsdp2" if style in _CHANGED else style)
    for old, new in _CHANGED.get(style, {}).items():
        assert old in found
        found = found.replace(old, new)
    return found.replace("8, 2048, 2048, 8", size)


def diff_for(found: Candidate, folder: Path) -> str:
    assert not isinstance(found.edits, str)
    return diff_of(found.edits, str(folder))


STYLES = {
    "fsdp2": f"{RESHARDED}@blocks", "checkpoint": f"{RESHARDED}@blocks", "functions": f"{RESHARDED}@blocks",
    "fsdp1": f"{MIXED}@blocks", "saved": f"{RESHARDED}@blocks",
    "stages": f"{RESHARDED}@stages.0.blocks@stages.1.blocks",
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("style", STYLES)
def test_a_patched_script_has_the_figures_of_its_mix(style: str, run: Run) -> None:
    files, variation = {"train.py": text(style)}, STYLES[style]
    plain, varied = run(files), run(files, variation)
    diff = diff_for(written(plain.observed, variation), plain.folder)
    patched = run(files, diff=diff)
    assert patched.figures == pytest.approx(varied.figures, rel=2e-3), diff
    assert patched.figures != pytest.approx(plain.figures, rel=2e-3)


@pytest.mark.campaign
def test_the_gain_is_that_of_the_patched_script(run: Run) -> None:
    """Of a script that recomputes all blocks, of which those that recompute nothing do not fit."""
    files = {"train.py": text("checkpoint", "12, 4096, 2048, 24")}
    plain = run(files)
    config = script_config({"script": plain.folder / "train.py", "gpus": "8", "hardware": "h100-80gb"}, ())
    assert config is not None
    advised = advise_script(config, Result.of(plain.result), 1, lambda line: None).advice
    (found,) = (each for each in advised if each.candidate.variation.startswith("by-unit"))
    assert found.gain is not None
    assert found.gain > 0.03
    patched = run(files, diff=found.diff)
    assert plain.figures[0] / patched.figures[0] - 1 == pytest.approx(found.gain, abs=2e-3)
    assert patched.figures[1] == pytest.approx(found.trial.reserved, rel=2e-3)


@pytest.mark.campaign
@pytest.mark.parametrize("style", STYLES)
def test_a_patched_script_has_the_losses_of_the_script_on_real_ranks(
    style: str, run: Run, tmp_path: Path
) -> None:
    small = text(style, "8, 128, 64, 4").replace("50304", "128")
    files = {"train.py": small.replace("optimizer = ", f"{_WEIGHTS}optimizer = ")}
    plain = run(files)
    diff = diff_for(written(plain.observed, STYLES[style]), plain.folder)
    losses = []
    for each in (plain, run(files, diff=diff)):
        config = script_config({"script": each.folder / "train.py", "gpus": "2"}, ())
        assert config is not None
        ran = run_ranks(config, tmp_path / each.folder.name, 2, 120.0, Task(Way.SHARDED, 3))
        assert not ran.failure
        assert ran.steps == 3
        losses.append([record.losses for step in range(3) for record in ran.records(step)])
    assert len({*itertools.chain(*losses[0])}) == 3, "it trains, and the ranks have the same samples"
    assert losses[0] == losses[1]


def test_a_framework_that_wraps_gets_code_to_paste(tmp_path: Path) -> None:
    source = "model = build()\ntrainer = Trainer(model)\ntrainer.train(model)\n"
    (tmp_path / "train.py").write_text(source)
    call = ShardingCall(str(tmp_path / "train.py"), 3, "", (3, 3, 0, 20))
    model = ObservedModel(blocks=RepeatedBlocks("model.layers", "Block", 8))
    seen = ObservedScript(sharding=[call], model=model)
    found = written(seen, f"{RESHARDED}@model.layers")
    with pytest.raises(NoDiffError, match=r"^train\(\) wraps the model"):
        diff_for(found, tmp_path)
    compile(found.write.partition("\n")[2], "pasted", "exec")
    assert "[*model.model.layers.children()][:3]:" in found.write
    assert "block.set_reshard_after_forward(number < 6)" in found.write


def test_blocks_of_several_lists_are_named_once(tmp_path: Path) -> None:
    source = "fully_shard(model)\nwith save_on_cpu():\n    loss = model(x)\n"
    (tmp_path / "train.py").write_text(source)
    file = str(tmp_path / "train.py")
    saved = Place(file, 2, "with save_on_cpu():", (2, 2, 5, 18))
    seen = ObservedScript(sharding=[ShardingCall(file, 1, "", (1, 1, 0, 18))], saved_on_host=saved)
    found = diff_for(written(seen, f"{RESHARDED}@encoder.layers@decoder.layers"), tmp_path)
    lists = (
        "for path in ('encoder.layers', 'decoder.layers') for block in model.get_submodule(path).children()"
    )
    assert f"+blocks_by_unit = [block {lists}]" in found
    assert found.count("get_submodule") == 1
    assert "+with contextlib.nullcontext():" in found
    seen = msgspec.structs.replace(seen, saved_on_host=msgspec.structs.replace(saved, text="model(x)"))
    elsewhere = written(seen, f"{RESHARDED}@layers")
    assert elsewhere.edits == "save_on_cpu, which would copy too, is called elsewhere"


def machine(config: Config) -> Trial:
    """A step of 6 blocks that hold 11 GiB each, or 1 that are recomputed in a third of their time, beside
    40 GiB; a tenth more may be needed."""
    assert config.what_if is not None
    words = str(config.what_if.variation).partition("=")[2].partition("@")[0].replace(",", "+").split("/")
    recomputed, moved, kept = map(spread, words)
    held = [1 if pair != ("none", "false") else 11 for pair in zip(recomputed, moved, strict=True)]
    size = round((40 + sum(held) + 2 * kept.count("false")) * GIB)
    step = 6 + recomputed.count("full") / 3 + 0.5 * moved.count("true") - 0.1 * kept.count("false")
    usable = usable_bytes(config) or 0
    interval = {"peak_memory_bytes": {"reserved": [round(size / 1.1), round(1.1 * size)]}}
    found = {
        "status": "ok" if size <= usable or config.what_if.room > 1 else "oom",
        "step_time_s": step,
        "peak_memory_bytes": {"allocated": size, "reserved": size},
        "interval": interval | {"level": 0.9, "step_time_s": [step, step], "risky": 1.1 * size > usable},
    }
    return Trial(config, Result.of(found))


@pytest.mark.parametrize("limited", [False, True])
def test_it_is_the_best_of_all_mixes_where_memory_limits(tmp_path: Path, limited: bool) -> None:
    (tmp_path / "train.py").write_text("")
    config = script_config({"script": tmp_path / "train.py", "gpus": "8"}, ())
    assert config is not None
    blocks = {"path": "layers", "class": "Block", "count": 6}
    model = {"blocks": blocks, "stacks": {"layers": 6}}
    base = Trial(config, Result.of({"status": "ok", "step_time_s": 6 + 6 / 3}))
    other = Trial(config, Result.of({"status": "oom" if limited else "ok", "step_time_s": 6.0}))

    def run(configs: Sequence[Config]) -> list[Trial]:
        return [machine(each) for each in configs]

    result = Result.of({"status": "ok", "script": {"observed": SEEN | {"model": model}}})
    found = [*by_unit(config, result, base, {"no-checkpoint": other}, run)]
    if not limited:
        assert not found
        return
    alike = itertools.product(itertools.product(*[("full", "none")] * 6), range(3), range(7))
    every = [
        f"by-unit={','.join(f'{how}:1' for how in each)}/{_first(moved)}/{_first(6 - kept)}"
        for each, moved, kept in alike
    ]
    assert len(every) > 1000
    trials = run([replace(config, what_if=WhatIf(variation=each)) for each in every])
    best = min(each.step_time_s or 99.0 for each in trials if each.fits and not each.risky)
    ((candidate, trial),) = found
    assert trial.step_time_s == pytest.approx(best)
    assert not trial.risky
    assert candidate.write.startswith("of 6 blocks recompute ")


def test_a_script_that_runs_out_of_memory_gets_the_best_mix_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    config = script_config({"script": tmp_path / "train.py", "gpus": "8"}, ())
    assert config is not None
    blocks = {"path": "layers", "class": "Block", "count": 6}
    model = {"blocks": blocks, "stacks": {"layers": 6}}
    ran = {"script": {"observed": SEEN | {"model": model}}, "status": "ok", "step_time_s": 6.0}
    ran |= {"measured": {}, "alloc_retries_per_step": 0, "peak_memory_bytes": {"reserved": 106 * GIB}}
    roomy, out = Trial(config, Result.of(ran)), Trial(config, Result.of({"status": "oom"}))
    lines_shown: list[str] = []

    def run(mixes: Sequence[Config], jobs: int, tell: Callable[[int], None]) -> list[Trial]:
        tell(len(mixes))
        return [machine(each) for each in mixes]

    monkeypatch.setattr(advisor, "simulate", run)
    found = fitting_mix(config, out, roomy, 1, lines_shown.append)
    assert found is not None
    assert found.gain is not None
    assert -0.25 < found.gain < 0, "faster than all recomputed, slower than with memory enough"
    assert found.trial.fits
    assert not found.trial.risky
    assert lines_shown[0].endswith("by unit")
    lines = describe_fitting(found).splitlines()
    assert lines[0] == "By unit, against the script with memory enough:"
    assert " slower [" in lines[1]
    assert entry(found)["status"] == "ok"
    assert fitting_mix(config, roomy, roomy, 1, lines_shown.append) is None


def _first(count: int) -> str:
    """The value for each unit where so many come first."""
    return ",".join(f"{word}:{n}" for word, n in (("true", count), ("false", 6 - count)) if n)
