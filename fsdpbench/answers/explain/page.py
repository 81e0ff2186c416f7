"""The explanation as one offline page: what to change first, then what held the memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from fsdpbench.answers.explain.advice import Account, Advice, Holder, account_of
from fsdpbench.answers.explain.text import as_dict, growth_lines, held_rows, price_words
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.reports.analysis.out_of_memory import size_text

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_page(path: Path, texts: Sequence[str], advice: Advice | None) -> None:
    """Write the page of an explanation. `texts`: as they are shown; the last one is that of the advice."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    simulation = None if advice is None else as_dict(advice)
    account = Account()
    if out := advice is not None and advice.as_it_is.status.value == "oom" and bool(advice.as_it_is.account):
        account = account_of(advice.as_it_is)
    page = environment.from_string(_TEMPLATE.read_text()).render(
        title=_title(account) if out else "Why memory ran out",
        simulation=simulation,
        changes=[_change(each) for each in (simulation or {}).get("changes", ())],
        held=_held(account),
        holders=[_holder(each) for each in account.holders],
        growth=[line for line in growth_lines(account) if line] if out else [],
        texts=texts[:-1] if out else texts,
    )
    write_whole(path, page)


def _title(account: Account) -> str:
    return f"Memory runs out in step {account.step}, phase {account.phase}, in {account.module}"


def _held(account: Account) -> list[dict[str, str]]:
    total = account.total_bytes
    return [
        {
            "what": what,
            "size": size_text(size),
            "share": f"{size / total:.1%}",
            "percent": f"{100 * size / total:.2f}",
        }
        for what, size in held_rows(account)
    ]


def _holder(each: Holder) -> dict[str, Any]:
    return {**msgspec.structs.asdict(each), "size": size_text(each.bytes), "line": each.line or ""}


def _change(each: dict[str, Any]) -> dict[str, Any]:
    price = "unknown" if each["price"] is None else price_words(each["price"])
    peak, retries = size_text(each["peak_reserved_bytes"]), f"{each['alloc_retries_per_step'] or 0:g}"
    return {**each, "price": price, "peak": peak, "retries": "" if retries == "0" else retries}
