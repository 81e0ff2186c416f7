"""Two thousand programs on torch's FSDP and on ours: ``pytest -n 0 -m campaign tests/impl/differential``.

``FUZZ_SEEDS=0:80`` says which seeds (25 programs each), ``FUZZ_DIR`` where counts and scripts are kept: what
is there already is not run again, so that several processes can share the work by ranges of seeds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from differential.campaign import ranks_of, report, run_seed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where counts and scripts are kept, in the end with a report of all seeds there."""
    folder = Path(os.environ.get("FUZZ_DIR") or tmp_path_factory.mktemp("programs"))
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    text = report(json.loads(path.read_text()) for path in sorted(folder.glob("seed-*.json")))
    print(text)
    (folder / "report.txt").write_text(text)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(*map(int, os.environ.get("FUZZ_SEEDS", "0:80").split(":"))))
def test_no_unexplained_difference(two_ranks, three_ranks, four_ranks, number: int, directory: Path) -> None:
    pools = {2: two_ranks, 3: three_ranks, 4: four_ranks}
    counts = run_seed(number, pools[ranks_of(number)], directory)
    assert not counts["failed"], f"{report([counts])}\nscripts: {directory}"
