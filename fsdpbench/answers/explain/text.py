"""The explanation as text and as an offline page: where memory ran out, what held it, what to change."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fsdpbench.answers.explain.advice import Advice, Proposal, grows, steps_until_full
from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.base.result_sections import MemoryAccount
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.analysis.out_of_memory import size_text

_CLOSE = 0.03
"""A change that leaves less than this share of the memory free is called tight."""
_MOST_FITS = 8
_WRITTEN = 46


def describe_advice(advice: Advice) -> str:
    """Return the explanation as text; all figures are simulated."""
    parts = ["head"]
    if _ran_out(advice) or advice.as_it_is.fits:
        parts += ["growth"]
        parts += ["changes"] * bool(_ran_out(advice) or advice.fits or advice.misses or advice.unstopped)
    return _rendered(advice, advice.as_it_is.account, *parts)


def describe_changes(advice: Advice) -> str:
    """Return the changes of `advice` that fit, and those that are not enough, as text."""
    return _rendered(advice, advice.as_it_is.account, "changes")


def _ran_out(advice: Advice) -> bool:
    return advice.as_it_is.result.memory_account is not None and advice.as_it_is.status is Status.OOM


def _rendered(advice: Advice, account: MemoryAccount, *parts: str) -> str:
    trial = advice.as_it_is
    return rendered_beside(
        __file__,
        "text.jinja",
        parts=parts,
        advice=advice,
        trial=trial,
        account=account,
        out=_ran_out(advice),
        held=held_rows(account),
        growing=grows(trial),
        stops=grows(trial) or grows(advice.roomy),
        steps=steps_until_full(account),
        proposal_lines=lambda proposal: _proposal(proposal, advice).splitlines(),
        most=_MOST_FITS,
        size=size_text,
    ).rstrip("\n")


def held_rows(account: MemoryAccount) -> list[tuple[str, int]]:
    """Return the parts of the GPU's memory in bytes, largest first."""
    rows = list(account.held_bytes.items())
    rows += [
        ("freed, in use by other streams", account.waiting_bytes),
        ("reserved and unused (fragmentation, cache)", account.unused_bytes),
        ("outside the allocator (context, NCCL)", account.outside_bytes),
        ("free", account.free_bytes),
    ]
    return sorted(((what, size) for what, size in rows if size), key=lambda row: -row[1])


def _proposal(proposal: Proposal, advice: Advice) -> str:
    """Return one change, its price and the memory that it needs, as text."""
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
    written = f"{write:<{_WRITTEN}}" if len(write) < _WRITTEN else f"{write}\n{'':<{_WRITTEN}}"
    return f"{written}{price:<14}{size_text(trial.reserved):>11}{note}  {proposal.change.meaning}{last}"


def price_words(price: float) -> str:
    """Return a price as text, such as `5.4 % slower`."""
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
    """Write the page of an explanation. `texts`: the texts to show; the last one belongs to `advice`."""
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
        growth=_rendered(advice, account, "growth").strip().splitlines() if advice and out else [],
        texts=texts[:-1] if out else texts,
    )
