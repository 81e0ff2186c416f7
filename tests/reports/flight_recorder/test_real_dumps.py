"""What torch itself writes, on real ranks over gloo, where one of them skips a collective."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.reports.analysis.flight_recorder import judge
from fsdpbench.reports.readers.flight_recorder import find_dumps

pytestmark = pytest.mark.campaign
JOB = """
import datetime, os, sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=5))
dist.all_reduce(torch.ones(4, 8))
dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
try:
    if rank == 0:
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
except RuntimeError as error:
    print(error)
for name, write in (("pickled", _dump_fr_trace), ("json", _dump_fr_trace_json)):
    os.makedirs(f"{folder}/{name}", exist_ok=True)
    with open(f"{folder}/{name}/nccl_trace_rank_{rank}", "wb") as file:
        file.write(write())
os._exit(0)
"""


@pytest.mark.parametrize("form", ["pickled", "json"])
def test_the_rank_that_skipped_a_collective_is_found(tmp_path: Path, form: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), tmp_path], env=environment) for rank in (0, 1)
    ]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    verdict = judge(find_dumps([tmp_path / form]))
    assert verdict.culprit.startswith("rank 1 never joined all_reduce(3 Double)")
    assert "collective 3 of group default_pg, where rank 0 waits" in verdict.culprit
    if form == "pickled":
        assert "at job.py:13" in verdict.culprit
