"""Plans on disk: whose folder is trusted, and files that are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fsdpbench.sim.torch_device.compile import CACHE_VARIABLE
from fsdpbench.sim.torch_device.compile.plan import choose_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's caches, with nothing asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, "")  # put back afterwards
    monkeypatch.delenv(CACHE_VARIABLE)
    return tmp_path


def test_plans_lie_among_the_users_own_caches(home: Path) -> None:
    folder = choose_folder(None)
    assert folder == home / "fsdpbench" / "compiled"
    assert folder.stat().st_mode & 0o077 == 0
    assert os.environ[CACHE_VARIABLE] == str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_folder(str(folder)) == choose_folder("") == folder


def test_torchs_default_is_nobodys_wish(home: Path) -> None:
    """The compiler's import writes it into the environment: a name that all users share."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert choose_folder(default_cache_dir()) == home / "fsdpbench" / "compiled"


@pytest.mark.parametrize("rights", [0o777, 0o775, 0o1777], ids=oct)
def test_a_folder_that_others_write_into_is_not_read(home: Path, rights: int) -> None:
    shared = home / "shared"
    shared.mkdir()
    shared.chmod(rights)
    with pytest.warns(
        UserWarning, match=f"{CACHE_VARIABLE}=.*shared: others can write into it; .* Name a folder"
    ):
        folder = choose_folder(str(shared))
    assert folder != shared
    assert folder.stat().st_mode & 0o077 == 0
    folder.rmdir()


def test_another_users_folder_is_not_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.warns(UserWarning, match="belongs to another user"):
        choose_folder(None).rmdir()


def test_what_is_no_folder(home: Path) -> None:
    (home / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be used"):
        choose_folder(str(home / "file")).rmdir()


COMPILES = """
import json
import torch
from fsdpbench.sim import Simulation, load_profile
from fsdpbench.sim.torch_device.compile.front_end import install
from fsdpbench.sim.torch_device.compile.refusals import REPORT

install()
sim = Simulation.start(load_profile("h100-80gb"), 1, 1)
x = torch.randn(64, 64, device="sim", requires_grad=True)
torch.compile(lambda x: torch.nn.functional.gelu(x).sum(-1))(x).sum().backward()
hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
launches = [[l.name, l.nbytes] for plan in REPORT.plans for l in plan.launches]
print(json.dumps([hits, REPORT.calls, launches, sim.cpu_ns()]))
"""


@pytest.mark.campaign
@pytest.mark.parametrize("content", [b"", b"\x80\x04broken", None], ids=["empty", "garbage", "cut"])
def test_a_plan_of_a_broken_file_takes_the_same_simulated_time(home: Path, content: bytes | None) -> None:
    def run() -> list[object]:
        done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, check=True)
        found: list[object] = json.loads(done.stdout.splitlines()[-1])
        return found

    hits, calls, *found = run()
    assert (hits, calls) == (0, 2)
    assert run() == [1, 2, *found]
    for path in (path for path in home.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert run()[1:] == [2, *found]
    assert run()[1:] == [2, *found]
