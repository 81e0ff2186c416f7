"""The explanation as one offline page: what to change first, then what held the memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from fsdpbench.answers.explain.advice import Account, Advice, account_of
from fsdpbench.answers.explain.text import growth_lines, held_rows, price_words
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.reports.analysis.out_of_memory import size_text

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_page(path: Path, texts: Sequence[str], advice: Advice | None) -> None:
    """Write the page of an explanation. `texts`: as they are shown; the last one is that of the advice."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"size": size_text, "price": price_words}
    account = Account()
    if advice is not None and advice.as_it_is.status.value == "oom":
        account = account_of(advice.as_it_is)
    out = account != Account()
    page = environment.from_string(_TEMPLATE.read_text()).render(
        title=_title(account) if out else "Why memory ran out",
        advice=advice,
        held=held_rows(account),
        account=account,
        growth=[line for line in growth_lines(account) if line] if out else [],
        texts=texts[:-1] if out else texts,
    )
    write_whole(path, page)


def _title(account: Account) -> str:
    return f"Memory runs out in step {account.step}, phase {account.phase}, in {account.module}"
