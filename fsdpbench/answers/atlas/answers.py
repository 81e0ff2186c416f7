"""The answer for a cell: the best settings with their interval, alternatives, or why nothing fits."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from fsdpbench.answers.atlas.lookup import Atlas, AtlasCell, Choice, Interval, Model
from fsdpbench.answers.atlas.space import SYSTEM, Cell, Results, fits_safely
from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.results.provenance import run_command, versions
from fsdpbench.reports.result import Result

SCHEMA = 1
AS_GOOD = 0.02
"""An alternative has a throughput at most this share below the best."""
_SHOWN = ("strategy", "activation_checkpointing", "batch", "seq")


def answered(cells: Sequence[Cell], results: Results) -> Atlas:
    """Return the atlas of `cells` from their `results`."""
    return Atlas(
        schema=SCHEMA,
        system=SYSTEM,
        versions=versions(),
        models={cell.model: Model(cell.parameters) for cell in cells},
        hardware=list(dict.fromkeys(cell.hardware for cell in cells)),
        gpus=sorted({cell.gpus for cell in cells}),
        cells=[_answer(cell, results) for cell in cells],
    )


def _answer(cell: Cell, results: Results) -> AtlasCell:
    found = list(cell.found(results))
    running = [(config, result) for config, result in found if result.tokens_per_s_per_gpu]
    failed = sorted(
        {str(result.message or result.status.value) for _, result in found if not result.status.is_answer}
    )
    answer = AtlasCell(
        cell.model,
        cell.hardware,
        cell.gpus,
        "fits" if running else "failed" if failed else "does_not_fit",
        simulated=len(found),
        pruned=cell.pruned + cell.simulable - len(found),
        failed=failed,
    )
    if not running:
        return replace(answer, reason=failed[0] if failed else _why(cell, found))
    safe = _fastest_first((config, result) for config, result in running if fits_safely(result))
    risky = _fastest_first((config, result) for config, result in running if not fits_safely(result))
    ranked = safe or risky
    least = _rate(ranked[0][1]) * (1 - AS_GOOD)
    return replace(
        answer,
        best=_choice(*ranked[0]),
        alternatives=[_choice(*each) for each in ranked[1:] if _rate(each[1]) >= least],
        risky=[_choice(*each) for each in risky if _rate(each[1]) > _rate(safe[0][1])] if safe else [],
    )


def _fastest_first(found: Iterable[tuple[Config, Result]]) -> list[tuple[Config, Result]]:
    return sorted(found, key=lambda each: -_rate(each[1]))


def _rate(result: Result) -> float:
    return result.tokens_per_s_per_gpu or 0.0


def _choice(config: Config, result: Result) -> Choice:
    interval = result.interval
    return Choice(
        settings={name: getattr(config.settings, name) for name in _SHOWN},
        tokens_per_s_per_gpu=_rate(result),
        step_time_s=result.step_time_s or 0.0,
        command=run_command(config),
        interval=Interval()
        if interval is None
        else Interval(
            interval.tokens_per_s_per_gpu,
            interval.step_time_s,
            interval.peak_memory_bytes.get("reserved"),
            interval.because,
        ),
        mfu=result.mfu,
        peak_reserved_bytes=result.reserved,
        alloc_retries_per_step=result.alloc_retries_per_step,
        risky=result.is_risky,
    )


def _why(cell: Cell, found: Sequence[tuple[Config, Result]]) -> str:
    if not cell.simulable:
        return "by arithmetic: training state and activations of one sample are more than the GPU's memory"
    if not found:
        return "the same settings run out of memory on more GPUs, where each holds less of the model"
    causes = [result.message or "" for _, result in found]
    return f"simulated with batch 1 and recomputation: out of memory ({causes[-1][:160]})"
