"""A real Slurm started for the tests, of one node or of two that this machine plays: munge, controller and
daemons in a folder of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm; `environment` makes its commands find it."""

    environment: dict[str, str]

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from started(tmp_path_factory.mktemp("slurm"), [socket.gethostname().split(".")[0]])


@pytest.fixture(scope="module")
def slurm_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from started(tmp_path_factory.mktemp("slurm"), ["first", "second"])


def started(folder: Path, nodes: list[str]) -> Iterator[Cluster]:
    """A running Slurm with these nodes, each a daemon of its own on this machine."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs the Debian package slurm-wlm (and munge): no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, to start the daemons of the Debian package slurm-wlm")
    environment = configured(folder, nodes)
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
         f"--socket={folder}/munge.sock", f"--pid-file={folder}/munge.pid",
         f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"],
        *(["slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf"] for node in nodes),
    ]  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    try:
        for place, words in enumerate(daemons):
            with (folder / f"{words[0]}{place}.out").open("wb") as log:
                running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            wait_for(lambda: (folder / "munge.sock").exists(), folder)
        cluster = Cluster(environment)
        wait_for(lambda: idle_nodes(environment) == len(nodes), folder)
        yield cluster
        cluster.call("scancel", "--user=root")
        deadline = time.monotonic() + 5
        while cluster.call("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        end_steps(folder)
        for process in reversed(running):  # killed: no later start reads their state
            process.kill()
            process.wait(timeout=15)


def configured(folder: Path, nodes: list[str]) -> dict[str, str]:
    """Write Slurm's and munge's files; the environment in which their commands find them."""
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # munge refuses a socket in a folder that others may write to or not enter
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host, cores = socket.gethostname().split(".")[0], os.cpu_count()
    lines = []
    for node in nodes:
        (folder / f"spool.{node}").mkdir()
        where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
        lines.append(f"NodeName={node} {where} CPUs={cores} State=UNKNOWN")
    text = CONFIGURATION.format(
        folder=folder, host=host, user="root", nodes="\n".join(lines), controller_port=free_port()
    )
    (folder / "slurm.conf").write_text(text)
    return {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}


def idle_nodes(environment: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
    told = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60).stdout
    return sum(line.split()[1:] == ["idle"] for line in told.splitlines())


def end_steps(folder: Path) -> None:
    """Kill what still runs a job's step. One that cannot end its job tries for ever: slurmd waits for it, and
    it is nobody's child, so that it would outlive the tests."""
    ours = f"SLURM_CONF={folder / 'slurm.conf'}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(b"slurmstepd") and ours in (
                (process / "environ").read_bytes().split(b"\0")
            ):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # it ended just now


def wait_for(happened: object, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not happened():  # type: ignore[operator]
        logs = {path.name: path.read_text()[-500:] for path in folder.glob("*.out")}
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
