"""Two races that this code once had: with their mends undone the sanitizer finds them.

``opt.step(); model.unshard()`` gathered while the optimizer still wrote; with hybrid sharding and
accumulation the reduce stream's memory was handed out while the all-reduce still used it.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
from race_cases import LOW, accumulate, follow, sharded, unshard_after_the_optimizer

from fsdpbench.impl.runtime.context import Context
from fsdpbench.impl.runtime.lent import LentMemory


def case_unshard_does_not_wait(rank: int) -> None:
    with patch.object(Context, "let_gathers_wait", lambda self, event=None: None):
        races, _ = follow(unshard_after_the_optimizer, sharded, {})
    assert any("'phase': 'optimizer'" in race and "all_gather" in race for race in races), races


def case_outputs_are_not_kept(rank: int) -> None:
    with patch.object(LentMemory, "lend_output", lambda *arguments: None):
        races, _ = follow(accumulate, sharded, {"mesh": (2, 4), "policy": LOW})
    assert any("use_after_free" in race for race in races), races


@pytest.mark.parametrize("case", [case_unshard_does_not_wait, case_outputs_are_not_kept])
def test_the_race_is_found(lone_process, case) -> None:
    lone_process.run(case)
