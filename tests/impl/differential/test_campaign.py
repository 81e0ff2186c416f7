"""Two thousand programs on torch's FSDP and on ours: ``pytest -n 0 -m campaign tests/impl/differential``.

``FUZZ_SEEDS=0:80`` says which seeds (25 programs each), ``FUZZ_DIR`` where counts and scripts are kept: what
is there already is not run again, so that several processes can share the work by ranges of seeds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from differential.campaign import ranks_of, report, run_seed


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_no_unexplained_difference(two_ranks, three_ranks, four_ranks, tmp_path: Path) -> None:
    first, last = map(int, os.environ.get("FUZZ_SEEDS", "0:80").split(":"))
    directory = Path(os.environ.get("FUZZ_DIR", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    pools = {2: two_ranks, 3: three_ranks, 4: four_ranks}
    counts = [run_seed(number, pools[ranks_of(number)], directory) for number in range(first, last)]
    text = report(counts)
    print(text)
    (directory / "report.txt").write_text(text)
    assert not any(each["failed"] for each in counts), f"{text}\nscripts: {directory}"
