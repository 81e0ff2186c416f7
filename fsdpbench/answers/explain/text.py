"""The explanation in words and as an offline page: where memory ran out, what held it, what to change."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fsdpbench.answers.explain.advice import Advice, Proposal, grows, steps_until_full
from fsdpbench.base.errors import error_text
from fsdpbench.base.result_sections import MemoryAccount
from fsdpbench.reports.analysis.out_of_memory import size_text
from fsdpbench.sweep.trials import Trial

_CLOSE = 0.03
"""With less than this share of the memory to spare a change is called tight."""
_MOST_HOLDERS = 6
_MOST_FITS = 8
_WRITTEN = 46


def describe_advice(advice: Advice) -> str:
    """Return the explanation as lines for people; all figures are simulated."""
    trial = advice.as_it_is
    if trial.result.memory_account is None or trial.status.value != "oom":
        return "\n".join(_without_oom(advice))
    account = trial.account
    lines = [
        f"Memory runs out in step {account.step}, phase {account.phase}"
        + (f", in {account.module}" if account.module != "outside of modules" else "")
        + (f", at {account.line}" if account.line else ""),
        *([". ".join(trial.cause.split(". ")[:3])] if trial.cause else []),
        *_how(trial),
        "",
        *_held(account),
        *_holders(account),
        *growth_lines(account),
        "",
        *change_lines(advice),
    ]
    return "\n".join(lines)


def _how(trial: Trial) -> Iterator[str]:
    """Eager or compiled; a script decides that itself."""
    if trial.config.script is None:
        yield f"The {'compiled' if trial.config.settings.compile else 'eager'} program was simulated."


def _without_oom(advice: Advice) -> Iterator[str]:
    trial = advice.as_it_is
    if not trial.fits:
        yield f"No answer: the simulation failed ({trial.status.value}): {trial.cause}"
        return
    steps = steps_until_full(trial.account) if grows(trial) else None
    if steps is not None:
        yield f"Memory grows from step to step, and runs out after about {steps:,} steps."
    peak = f"it reserves {size_text(trial.reserved)} at most ({trial.retries:g} allocator retries a step)"
    if trial.retries or trial.risky:
        yield f"Simulated, it hardly fits: {peak}. On GPUs it may run out of memory."
    elif steps is not None:
        yield f"Its first steps, simulated, fit: {peak}."
    else:
        yield f"Simulated, it does not run out of memory: {peak}."
        yield error_text("text.not_on_these_gpus")
    yield from _how(trial)
    yield from growth_lines(trial.account)
    if advice.fits or advice.misses or advice.unstopped:
        yield ""
        yield from change_lines(advice)


def held_rows(account: MemoryAccount) -> list[tuple[str, int]]:
    """Return the parts of the GPU's memory, largest first; bytes."""
    rows = list(account.held_bytes.items())
    rows += [
        ("freed, in use by other streams", account.waiting_bytes),
        ("reserved and unused (fragmentation, cache)", account.unused_bytes),
        ("outside the allocator (context, NCCL)", account.outside_bytes),
        ("free", account.free_bytes),
    ]
    return sorted(((what, size) for what, size in rows if size), key=lambda row: -row[1])


def _held(account: MemoryAccount) -> Iterator[str]:
    total = account.total_bytes
    yield f"What held the {size_text(total)}:"
    for what, size in held_rows(account):
        yield f"  {what:<44}{size_text(size):>12}{size / total:>7.0%}"


def _holders(account: MemoryAccount) -> Iterator[str]:
    yield ""
    yield "The largest, by module" + (" and line:" if any(each.line for each in account.holders) else ":")
    for each in account.holders[:_MOST_HOLDERS]:
        line = f"  {each.line}" if each.line else ""
        yield f"  {size_text(each.bytes):>12}  {each.category}, {each.module}{line}"


def growth_lines(account: MemoryAccount) -> Iterator[str]:
    """Yield what grows from step to step; nothing where too few steps ended."""
    growth = account.growth
    ends = growth.at_step_ends_bytes
    if not growth.per_step_bytes:
        if len(ends) > 2:
            yield ""
            yield f"Nothing grows from step to step ({len(ends)} steps, {size_text(ends[-1])} at their ends)."
        return
    yield ""
    yield error_text("text.memory_grows", size_text(growth.per_step_bytes))
    for each in growth.where:
        yield f"  {size_text(each.bytes):>12}  {each.module}" + (f", {each.line}" if each.line else "")
    yield f"At this rate memory runs out after about {steps_until_full(account):,} steps."


def change_lines(advice: Advice) -> Iterator[str]:
    """Yield the changes of `advice` that fit, and those that are not enough."""
    growing = grows(advice.as_it_is) or grows(advice.roomy)
    if advice.unstopped:
        yield error_text("text.not_detached")
        return
    if advice.roomy.allocated is not None and not growing:
        needed = size_text(advice.roomy.allocated)
        yield f"It needs {needed} of tensors at its peak (simulated with more room)."
    if not advice.fits:
        tried = f"None of {len(advice.misses)} changes and combinations that were simulated"
        yield f"{tried if advice.misses else 'No change that could be simulated'} fits."
        return
    if growing:
        yield "What stops the growth, simulated:"
    elif advice.as_it_is.fits:
        yield "Changes that leave room, each simulated, the cheapest first:"
    else:
        yield "Changes that fit, each simulated, the cheapest first:"
    for proposal in advice.fits[:_MOST_FITS]:
        yield f"  {proposal_line(proposal, advice)}"
    if advice.misses:
        yield "Not enough, simulated too: " + "; ".join(change.write for change in advice.misses[:_MOST_FITS])


def proposal_line(proposal: Proposal, advice: Advice) -> str:
    """Return one change, its price and what it leaves."""
    trial, account = proposal.trial, advice.as_it_is.account
    price = "speed unknown" if proposal.price is None else price_words(proposal.price)
    room = account.total_bytes - account.outside_bytes - (trial.reserved or 0)
    note = ""
    if trial.retries:
        note = f", {trial.retries:g} allocator retries a step: tight"
    elif 0 <= room < _CLOSE * account.total_bytes:
        note = ", tight"
    last = " (last resort)" if proposal.change.last_resort else ""
    write = proposal.change.write
    written = f"{write:<{_WRITTEN}}" if len(write) < _WRITTEN else f"{write}\n  {'':<{_WRITTEN}}"
    return f"{written}{price:<14}{size_text(trial.reserved):>11}{note}  {proposal.change.meaning}{last}"


def price_words(price: float) -> str:
    """`5.4 % slower`."""
    if abs(price) < 0.0005:
        return "as fast"
    if price < -1.0:
        return f"{1.0 - price:.1f} x as fast"
    return f"{abs(price):.1%}".replace("%", " %") + (" slower" if price > 0 else " faster")


def as_dict(advice: Advice) -> dict[str, object]:
    """Return the advice as plain values."""
    trial = advice.as_it_is
    return {
        "simulated": True,
        "configuration": trial.config.name,
        "compiled": None if trial.config.script is not None else bool(trial.config.settings.compile),
        "status": trial.status.value,
        "cause": trial.cause,
        "account": msgspec.to_builtins(trial.result.memory_account),
        "needed_bytes": advice.roomy.allocated,
        "changes": [
            {
                "write": each.change.write,
                "meaning": each.change.meaning,
                "settings": dict(each.change.settings),
                "last_resort": each.change.last_resort,
                "price": each.price,
                "step_time_s": each.trial.step_time_s,
                "peak_reserved_bytes": each.trial.reserved,
                "alloc_retries_per_step": each.trial.retries,
            }
            for each in advice.fits
        ],
        "not_enough": [change.write for change in advice.misses],
        "configurations_simulated": advice.simulated,
    }


def write_page(path: Path, texts: Sequence[str], advice: Advice | None) -> None:
    """Write the page of an explanation. `texts`: as they are shown; the last one is that of the advice."""
    from fsdpbench.reports.pages import shell  # slow, and only the page needs it

    account = MemoryAccount()
    if advice is not None and advice.as_it_is.status.value == "oom":
        account = advice.as_it_is.account
    out = account != MemoryAccount()
    where = f"step {account.step}, phase {account.phase}, in {account.module}"
    shell.write_page(
        path,
        "answers/explain/page.html.jinja",
        draws=False,
        size=size_text,
        price=price_words,
        title=f"Memory runs out in {where}" if out else "Why memory ran out",
        advice=advice,
        held=held_rows(account),
        account=account,
        growth=[line for line in growth_lines(account) if line] if out else [],
        texts=texts[:-1] if out else texts,
    )
