"""Two machines under torchrun, played by two processes on this one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.cli.commands.sweep import make_launcher
from fsdpbench.launch.nodes import Nodes, follow

PROGRAM = "from fsdpbench.cli import main; main()"
SHAPE = "layers=2,d_model=32,heads=2,vocab=64,max_seq=16"
SWEEP = ["sweep", "--model", "gpt", "--shape", SHAPE, "--gpus", "2", "--device", "cpu", "--wrap", "block"]
SPACE = ["--system", "impl-fsdp2", "--strategy", "FULL_SHARD", "--backward-prefetch", "pre"]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@pytest.mark.campaign
def test_a_sweep_over_two_nodes(fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--launcher", "torchrun", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words = [*SWEEP, *SPACE, *words, "-o", str(tmp_path / "run")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-c", PROGRAM, *words, "--node-rank", "0"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as leader:
        try:
            follower = fsdpbench(*words, "--node-rank", "1")
            output = leader.communicate(timeout=100)
        finally:
            leader.kill()
    assert (leader.returncode, follower.returncode) == (0, 0), (output, follower.stderr)
    assert "took part in 1 configurations" in follower.stderr
    (path,) = (tmp_path / "run").glob("*/result.json")
    result = json.loads(path.read_text())
    assert result["status"] == "ok", result["cause"]
    assert result["config"]["gpus_per_node"] == 1
    assert len(result["traces"]) == 2
    assert {path.name for path in (path.parent / "logs").glob("node*_stderr.log")} == {
        "node0_stderr.log", "node1_stderr.log",
    }  # fmt: skip


def test_a_follower_gives_up_on_a_leader_that_never_begins(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--node-rank 0"):
        follow(tmp_path, Nodes(2, 1, "127.0.0.1:1"), lambda: False, patience_s=0.3)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"launcher": "torchrun"}, "--rdzv-endpoint"),
        ({"launcher": "local", "nnodes": 2}, "--launcher torchrun"),
        ({"launcher": "torchrun", "time_minutes": 3}, "--time belongs to --launcher slurm"),
        ({"launcher": "torchrun", "nnodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"}, "0 to 1"),
        ({"launcher": "torchrun", "nnodes": 3, "node_rank": 0, "rdzv_endpoint": "a:1"}, "divided"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_launcher(options, [8])
