"""The sanitizer finds bugs put into programs, at their lines, and says nothing of the mended ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
QUICK = (
    "side_streams.columns_that_overlap",
    "side_streams.one_event_recorded_twice",
    "side_streams.many_columns_then_the_first",
    "host_copies.copied_and_waited_for_into",
    "memory.part_of_a_split_block",
    "memory.two_names_by_dlpack",
    "host_copies.converted_on_its_way",
    "host_copies.contiguous_slice_rewritten",
    "host_copies.foreach_copied_and_read",
    "host_copies.pickled_too_early",
    "collectives.outcome_of_then",
    "backward.weight_gradient_on_a_side_stream",
    "decisions.compared_on_another_stream",
    "decisions.hook_of_ddp_that_compresses",
    "offload.used_before_it_is_back",
    "clean.two_branches_with_ddp",
    "clean.two_branches_sharded",
    "clean.fused_step_only_reads_gradients",
    "clean.freed_to_the_driver",
)
"""Words of names; `seeded.py` runs all whose names hold one."""


_CODE = f"""
import dataclasses, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(HERE)!r})
import seeded
seeded.run(*sys.argv[1:])
bug = seeded.BUGS["side_streams.columns_that_overlap"]
mended = lambda fixed: bug.program(True)
for change in {{"kind": "use_after_free"}}, {{"first": bug.second}}, {{"program": mended}}:
    print(seeded.judge(dataclasses.replace(bug, **change)))
"""


def judge(in_forks: Any, *names: str) -> list[str]:
    """What the judge of these bugs and programs prints, and of three that are judged wrongly on purpose."""
    (done,) = in_forks(_CODE, [[*names]], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout.splitlines()


def test_bugs_are_found_and_mends_believed(in_forks: Any) -> None:
    *reports, kind, place, missed = judge(in_forks, *QUICK)
    count = f"{len(QUICK) - 4} bugs and their mends, 4 clean programs, 0 judged wrongly"
    assert reports[-1] == count, "\n".join(reports)
    # The judge itself: another kind, another place and a missed bug count.
    assert "expected use_after_free" in kind
    assert "found race" in place
    assert missed == "['side_streams.columns_that_overlap: missed']"


@pytest.mark.campaign
def test_all_bugs_and_clean_programs(in_forks: Any) -> None:
    reports = judge(in_forks)
    print("\n".join(reports))
    assert reports[-4].endswith(", 0 judged wrongly")


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_drawn_configurations_are_clean() -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "clean_configurations.py"), "300", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    *_, statuses, counted, findings = done.stdout.splitlines()
    assert counted.startswith("300 configurations")
    assert findings.endswith("; 0 configurations with findings")
    assert statuses.split()[-1] in ("ok", "error", "crash")
