"""Per-unit choices for a script: which blocks recompute and offload, and which units stay gathered.

It uses the search of `tune --per-unit`; each mix that the search tries is a variation of the script.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdpbench.answers.advise.candidates import Candidate, advice, not_recomputed, not_saved
from fsdpbench.answers.advise.edits import Edit
from fsdpbench.answers.tune import front
from fsdpbench.answers.tune.per_unit import Family, Mix, Search, alike, is_safe
from fsdpbench.base.configuration.config import Config, WhatIf
from fsdpbench.base.configuration.script_source import Variation
from fsdpbench.base.result_sections import ObservedScript
from fsdpbench.base.settings.values import joined, spread
from fsdpbench.reports.result import Result
from fsdpbench.sweep.trials import Trial

_CHECKPOINT = "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"

_Simulate = Callable[[Sequence[Config]], list[Trial]]


@dataclass(frozen=True)
class _Blocks(Family):
    """The blocks of a script, in the module lists `paths`. Selective recomputation is not available."""

    paths: tuple[str, ...] = ()

    def config(self, mix: Mix) -> Config:
        """Return the script with the variation of `mix`."""
        recomputed, moved = self.of_blocks(mix)
        kept = [True] * (self.units - mix.kept) + [False] * mix.kept
        each = [joined(part).replace("+", ",") for part in (recomputed, moved, kept) if part]
        value = "@".join(["/".join(each), *self.paths])
        return replace(self.base, what_if=WhatIf(variation=f"{Variation.BY_UNIT}={value}"))


def by_unit(
    config: Config, result: Result, base: Trial, trials: Mapping[str, Trial], simulate: _Simulate
) -> Iterator[tuple[Candidate, Trial]]:
    """Yield the fastest mix that surely fits, and its trial, if memory limits a script and a mix is faster or
    the script does not fit. `config`: the configuration to vary; `trials`: trials of other variations."""
    seen = result.observed
    if seen is None:
        return
    calls, blocks, stacks = seen.sharding, seen.model.blocks, seen.model.stacks
    # These variations are faster if memory suffices. If one does not fit, memory limits the script.
    names = "no-checkpoint", "no-save-on-cpu", "no-offload", "keep"
    tight = [trials[name] for name in names if name in trials]
    limited = base.retries or any(not each.fits or each.risky for each in (base, *tight))
    if not calls or not (blocks or stacks) or not limited or seen.model.unwrapped_root:
        return
    alone = bool(stacks) and max(call.together for call in calls) == 1
    if not stacks and blocks is not None:
        stacks = {blocks.path: blocks.count}
    kinds = alike(kind for kind, count in enumerate(stacks.values()) for _ in range(count))
    given = [call.arguments for call in calls]
    free = alone and not calls[-1].is_fsdp1
    free &= all(each.get("reshard_after_forward") in (None, True, False) for each in given)
    offloads = alone and not result.compiled and not any(each.get("offload") for each in given)
    family = _Blocks(config, kinds, len(kinds) if free else 0, offloads, False, (*stacks,))
    ran: list[Trial] = []

    def judge(configs: Sequence[Config]) -> list[front.Candidate]:
        found = simulate(configs) if configs else []
        ran.extend(found)
        return [_judged(each) for each in found]

    now = _judged(base)
    search = Search(judge, None, (), now if is_safe(now) else None)
    search.search([family], 0)
    search.improve()
    for trial in ran:
        if search.best is not None and trial.config == search.best.config and trial.config.what_if:
            yield written(seen, trial.config.what_if.variation or ""), trial


def _judged(trial: Trial) -> front.Candidate:
    what = trial.status, trial.speed or 0.0, trial.reserved, trial.fits, trial.interval, trial.risky
    return front.Candidate(trial.config, *what)


def written(seen: ObservedScript, variation: str) -> Candidate:
    """Return the candidate that writes a variation into the observed script."""
    mix, *paths = variation.partition("=")[2].split("@")
    each = [spread(part.replace(",", "+")) for part in mix.split("/")]
    recomputed = [place for place, how in enumerate(each[0]) if how == "full"]
    moved = [place for place, word in enumerate(each[1]) if word == "true"]
    calls, blocks = seen.sharding, f"{{0}}.{paths[0]}.children()"
    before, after, imports = [], [], []
    if len(paths) > 1:
        blocks, holder = "blocks_by_unit", "{0}.get_submodule(path)"
        before.append(f"{blocks} = [block for path in {(*paths,)} for block in {holder}.children()]")
    if recomputed:
        before += [f"for block in {_of(blocks, recomputed)}:\n    block.forward = {_CHECKPOINT}"]
        imports = ["import functools", "import torch.utils.checkpoint"]
    if moved:
        before.append(f"offload_activations({_of(blocks, moved)})")
        imports.append("from fsdpbench.impl import offload_activations")
    words = f"of {len(each[0])} blocks recompute {len(recomputed)}, offload {len(moved)}"
    if len(each) > 2:
        resharded = each[2].count("true")
        body = f"    block.set_reshard_after_forward({f'number < {resharded}' if resharded else False})"
        after = [f"for number, block in enumerate({blocks}):\n{body}"]
        words += f", keep {len(each[2]) - resharded} gathered after forward"
    edits = [Edit(calls[-1], "imports", (text,)) for text in imports]
    spans, saved = [call.span for call in calls], not_saved(seen)
    edits += [*not_recomputed(seen), *(saved or ()), Edit(calls[-1], "beside", (spans, before, after))]
    code = [*imports, "# before the blocks are wrapped, in the place of all other recomputation:", *before]
    code += ["# after the model is wrapped:", *after] if after else []
    said = {"words": words, "code": "\n".join(code).replace("{0}", "model")}
    done = None if saved is None else tuple(edits)
    return replace(advice("by-unit", calls[-1].short, done, words=said), variation=variation)


def _of(blocks: str, places: Sequence[int]) -> str:
    """Return the source of an expression for the blocks at `places`."""
    if places == list(range(len(places))):
        return f"[*{blocks}][:{len(places)}]"
    return f"[block for number, block in enumerate({blocks}) if number in {tuple(places)}]"
