"""Parts 2 to 4, 6 and 7 of a proof: checks of one simulated run of the script at full size."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fsdpbench.answers.advise.advisor import advise_script
from fsdpbench.answers.advise.candidates import Kind, gradients
from fsdpbench.answers.check.compare import compare, diagnose
from fsdpbench.answers.check.records.baseline import Baseline
from fsdpbench.answers.check.records.sides import baseline_side, stored_side
from fsdpbench.answers.check.text import shown_percent
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.answers.prove.verdict import Part, PartVerdict, judged, shown, unknown
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import spread_ranks
from fsdpbench.base.result_sections import HostMemory
from fsdpbench.engine.results.records import Status
from fsdpbench.engine.results.store import Store
from fsdpbench.reports.result import Result
from fsdpbench.sweep.goodput import full_checkpoint, sharded_checkpoint
from fsdpbench.sweep.runner import run_sweep
from fsdpbench.sweep.trials import Progress, jobs_for

_GIB = 1 << 30
_WORTH_SAYING = _GIB // 20
_MEASURED = (Status.OK, Status.RACE, Status.RANK_MISMATCH)


def simulate(config: Config, folder: Path, checks_ranks: bool) -> Result:
    """Run the script at full size with the sanitizer, and with several ranks if `checks_ranks`."""
    assert config.script is not None
    ranks = spread_ranks(config.gpus, None) if checks_ranks and config.gpus > 1 else ()
    script = replace(config.script, check_ranks=ranks)
    store = Store.open_or_create(folder)
    point = replace(config, sanitize=True, script=script)
    store.write_space({"schema": 1, "model": config.model, "system": [config.system]}, [point])
    return run_sweep(store, [point], Progress(), jobs=1, again=True).ran[0].result


def judge(part: Part, result: Result, config: Config) -> PartVerdict:
    """Return the verdict of a part that only needs the simulated run."""
    of_part = {Part.RACES: _races, Part.RANKS: _ranks, Part.MEMORY: _memory, Part.SETTINGS: _settings}
    found = of_part[part](result, config)
    why = f"{result.status.value}: {result.message or 'the simulated run left no figures'}"
    return unknown(part, why) if found is None else found


def _is_measured(result: Result) -> bool:
    """Return whether rank 0 finished; another rank may have run into the timeout."""
    return result.status in _MEASURED or (result.status is Status.TIMEOUT and result.rank_check is not None)


def _races(result: Result, config: Config) -> PartVerdict | None:
    found = result.sanitizer
    if found is None or not _is_measured(result):
        return None
    counts: Counter[str] = Counter()
    for each in found.findings:
        first, second = (f"{side.operation} at {side.line}" for side in (each.first, each.second))
        counts[f"{each.kind.replace('_', ' ')}: {first} and {second}: {each.hint}"] += each.count
    lines = [f"{line} ({count:,} times)" for line, count in counts.items()]
    where = f"in {found.accesses:,} uses of memory on {config.gpus} simulated GPUs"
    return judged(Part.RACES, lines, f"{len(lines) or 'none'} {where}")


def _ranks(result: Result, config: Config) -> PartVerdict | None:
    if config.gpus < 2:
        return judged(Part.RANKS, [], "one rank")
    if result.status is Status.RANK_MISMATCH:
        return judged(Part.RANKS, [result.message or "ranks differ"], "ranks issue different collectives")
    if result.rank_check is None or result.status not in _MEASURED:
        return None
    ran = ", ".join(map(str, spread_ranks(config.gpus, None)))
    return judged(Part.RANKS, [], f"ranks {ran} issue the same collectives")


def _memory(result: Result, config: Config) -> PartVerdict | None:
    if result.status is Status.OOM:
        return judged(Part.MEMORY, [result.message or "out of memory"], "does not fit", "oom")
    peak, total = result.reserved, result.stored("hardware.memory_bytes")
    if not _is_measured(result) or peak is None:
        return None
    of = f" of {total / _GIB:.1f}" if isinstance(total, int | float) else ""
    phases = {"in training": int(peak)} | (result.script.peaks if result.script else {})
    when = max(phases, key=lambda each: phases[each])
    said = f"{phases[when] / _GIB:.1f}{of} GiB reserved at the peak, {when}"
    host = result.script.host_peak if result.script else HostMemory()
    if host.bytes + host.ahead > _WORTH_SAYING:
        own, ahead = host.bytes / _GIB, host.ahead / _GIB
        more = f" and {ahead:.1f} GiB of batches ahead" if host.ahead > _WORTH_SAYING else ""
        node = (own + ahead) * config.ranks_per_node
        said += f"; {own:.1f} GiB of host tensors on rank 0 {host.when}{more}, at most {node:.1f} a node"
    if host.workers:
        said += f"; not counted: what {host.workers} loader workers a rank copy of their dataset"
    risk = ["the peak fits only within the error of the simulation"] * result.is_risky
    return judged(Part.MEMORY, risk, said, "risky" * result.is_risky)


def saving_words(result: Result, config: Config) -> str:
    """Return the time of the script's largest checkpoint at full size, as text; empty if it is small."""
    saved = result.script and result.script.saved
    if not saved or saved.bytes < _WORTH_SAYING:
        return ""
    nbytes, hardware = saved.bytes, config.hardware
    if saved.is_sharded:
        total, tensors = nbytes * config.gpus, saved.tensors
        found, what = sharded_checkpoint(total, nbytes, tensors, hardware, config.gpus), "all ranks save"
    else:  # files of other ranks are not simulated
        found, what = full_checkpoint(nbytes, hardware), "rank 0 saves"
    planning = f"{found.plan_s:.1f} s to plan, " if found.plan_s else ""
    times = f"{planning}{found.copy_s:.1f} s to copy, {found.write_s:.1f} s to write"
    return f"{what} {found.nbytes / 1e9:,.1f} GB: {times}"


def _settings(result: Result, config: Config) -> PartVerdict | None:
    if not result.step_time_s:
        return None
    found = advise_script(config, result, jobs_for("sim"), lambda line: None, (Kind.NO_EFFECT,))
    lines = [f"{each.candidate.place}: {each.candidate.what}" for each in found.no_effect]
    return judged(Part.SETTINGS, lines, f"{len(lines) or 'none'} without effect")


def speed(folder: Path, config: Config, baseline: Path, thresholds: Thresholds) -> PartVerdict:
    """Return the gate's verdict on the run in `folder` against the same configuration of a committed
    baseline. The baseline runs without sanitizer and rank check, which change no figure."""
    before, after = baseline_side(Baseline.read(baseline), baseline), stored_side(folder)
    name = config.name
    if name not in before.entries:
        return unknown(Part.SPEED, f"{baseline} has no {name}; it has {shown(list(before.entries))}")
    entries = {name: next(iter(after.entries.values()))} if after.entries else {}
    found = compare({name: before.entries[name]}, entries, thresholds, after.absent, before.left_out)
    lines = [each.sentence for each in diagnose(found)] if found.regressions else []
    if found.unjudged or not found.compared:
        return unknown(Part.SPEED, "; ".join(map(str, found.unjudged)), lines)
    step = next((each.relative for each in found.changes if each.metric == "step_time_s"), 0.0)
    said = f"{shown_percent(step)} a step against {name} of {baseline}"
    return judged(Part.SPEED, lines, said, "slower" if lines else "")


def unreduced(result: Result) -> Iterator[str]:
    """Yield findings on gradients that are not reduced in the simulation at full size."""
    observed = result.observed
    for each in gradients(observed, result) if observed else ():
        if each.kind is Kind.WRONG:
            yield f"{each.place}: {each.what} (simulated, at full size)"
