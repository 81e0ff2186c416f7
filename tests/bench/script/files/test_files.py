"""Files of simulated tensors go into the run's folder; what was there before the run stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from conftest import RunScript

HEAD = """
import glob, io, json, os, pickle, shutil, sys, tarfile
import numpy as np
from pathlib import Path
os.chdir(sys.argv[1])
state = torch.nn.Linear(64, 64).cuda().state_dict()
train(2)
"""


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_a_real_checkpoint_survives_and_the_run_reads_its_own(run_probe: RunScript, tmp_path: Path) -> None:
    here = tmp_path / "work"
    (here / "ckpt" / "step-1").mkdir(parents=True)
    (here / "ckpt" / "step-1" / "model.pt").write_bytes(b"real")
    (here / "best.pt").write_bytes(b"real")
    (here / "last.pt").write_bytes(b"real")
    (here / "model.nemo").write_bytes(b"real")
    (here / "ckpt" / "latest").symlink_to("step-1")
    before = _tree(here)
    run = run_probe(
        HEAD
        + """
assert Path("best.pt").read_bytes() == b"real"
for step in range(2, 5):
    with open("best.tmp", "wb") as file:
        torch.save(state, file)
    os.replace("best.tmp", "best.pt")
    folder = Path("ckpt", f"step-{step}")
    folder.mkdir()
    torch.save({"state": state, "step": step, "loss": state["bias"][0].item()}, folder / "model.pt")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    os.remove("ckpt/latest")
    os.symlink(f"step-{step}", "ckpt/latest")
    for old in sorted(glob.glob("ckpt/step-*"))[:-2]:
        shutil.rmtree(old)
assert sorted(os.listdir("ckpt")) == ["latest", "step-3", "step-4"]
assert {entry.name for entry in os.scandir("ckpt/latest")} == {"model.pt", "state.json"}
assert torch.load("ckpt/latest/model.pt")["step"] == 4 and not os.path.exists("ckpt/step-1/model.pt")
assert torch.load("best.pt", weights_only=True)["bias"].device.type == "cuda"
shutil.copy("best.pt", "copy.pt")
buffer = io.BytesIO()
torch.save(state, buffer)
Path("last.pt").write_bytes(buffer.getvalue())
np.save("weight.npy", state["weight"].cpu().numpy())
with tarfile.open("model.nemo", "w") as archive:
    archive.add("last.pt")
""",
        str(here),
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause
    assert _tree(here) == before
    told = run.result["redirected_files"]
    assert {str(Path(path).relative_to(here)) for path in told["files"]} == {
        "best.pt", "copy.pt", "last.pt", "model.nemo", "weight.npy", "ckpt/step-3/model.pt",
        "ckpt/step-3/state.json", "ckpt/step-4/model.pt", "ckpt/step-4/state.json",
    }  # fmt: skip
    assert str(here / "ckpt" / "step-1") in told["left_in_place"]
    assert told["bytes"] > 6 * 64 * 64 * 4
    assert torch.load(run.written(here / "best.pt"), map_location="cpu")["bias"].shape == (64,)
    last = torch.load(
        run.written(here / "ckpt" / "step-4" / "model.pt"), map_location="cpu", weights_only=True
    )
    assert repr(last["loss"]) == "0.0"


def test_files_without_tensors_stay_where_they_are(run_probe: RunScript, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("before\n")
    run = run_probe(
        HEAD
        + """
with open("log.txt", "a") as log:
    log.write("run\\n")
os.makedirs("out/inner")
Path("out/inner/metrics.json").write_text("{}")
with open("vocabulary.pkl", "wb") as file:
    pickle.dump(["a", "b"], file)
torch.save({"seed": 1}, "arguments.bin")
os.rename("vocabulary.pkl", "out/vocabulary.pkl")
array = np.memmap("tokens.bin", dtype="int32", mode="w+", shape=(4,))
array[:] = 7
array.flush()
import tempfile
with tempfile.TemporaryDirectory() as folder:
    torch.save(state, os.path.join(folder, "part.pt"))
    assert os.listdir(folder) == ["part.pt"]
assert not os.path.exists(folder)
""",
        str(tmp_path),
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause
    assert (tmp_path / "log.txt").read_text() == "before\nrun\n"
    assert (tmp_path / "out" / "inner" / "metrics.json").read_text() == "{}"
    assert (tmp_path / "out" / "vocabulary.pkl").is_file()
    assert torch.load(tmp_path / "arguments.bin") == {"seed": 1}
    assert (tmp_path / "tokens.bin").read_bytes() == b"\x07\0\0\0" * 4
    assert "redirected_files" not in run.result


def test_a_sharded_checkpoint_over_a_real_one(run_probe: RunScript, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / "saved" / name).write_bytes(b"real")
    before = _tree(tmp_path / "saved")
    run = run_probe(
        """
        import sys
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("cpu:gloo,cuda:nccl")
        assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
        model = fully_shard(torch.nn.Linear(64, 64).cuda())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            if step == 1:
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
                saving = dcp.async_save(state, checkpoint_id=sys.argv[1])
        saving.result()
        dcp.load(state, checkpoint_id=sys.argv[1])
        """,
        str(tmp_path / "saved"),
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause
    assert _tree(tmp_path / "saved") == before
    assert run.result["redirected_files"]["count"] == 2


def test_what_cannot_be_redirected_is_refused(run_probe: RunScript, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for text, words in (
        ("import subprocess; subprocess.run(['rm', '-rf', 'old'])", "'rm -rf old' is not simulated"),
        ("os.rename('old', 'older')", "was there before the run"),
    ):
        run = run_probe(HEAD + text, str(tmp_path), to_the_end=True)
        assert run.result["status"] == "error"
        assert words in run.cause
        assert run.result["step_time_s"] > 0, "what was measured before stays"
    assert (tmp_path / "old").is_dir()


def test_a_killed_run_leaves_no_file_of_simulated_tensors(run_probe: RunScript, tmp_path: Path) -> None:
    (tmp_path / "best.pt").write_bytes(b"real")
    run = run_probe(
        HEAD
        + """
import signal
os.makedirs("ckpt-1")
Path("ckpt-1/state.json").write_text("{}")
torch.save(state, "ckpt-1/part.tmp")
os.rename("ckpt-1/part.tmp", "ckpt-1/model.pt")
torch.save(state, "new.pt")
torch.save(state, "best.pt")
Path("log.txt").write_text("stays")
os.kill(os.getpid(), signal.SIGKILL)
""",
        str(tmp_path),
        to_the_end=True,
    )
    assert run.result["status"] == "crash"
    assert (tmp_path / "best.pt").read_bytes() == b"real"
    assert (tmp_path / "log.txt").read_text() == "stays"
    assert not (tmp_path / "new.pt").exists()
    assert not (tmp_path / "ckpt-1").exists()
    assert run.written(tmp_path / "ckpt-1" / "model.pt").is_file()


def test_other_programs_and_libraries_in_c_find_what_was_written(
    run_probe: RunScript, tmp_path: Path
) -> None:
    """After a number of the device was read, as Hugging Face's datasets writes its cache."""
    run = run_probe(
        HEAD
        + """
import mmap, sqlite3, subprocess
seed = int(state["bias"][0].item())
os.makedirs("cache.incomplete")
with open("cache.incomplete/data.arrow", "wb") as file:
    file.write(b"ARROW1" + bytes(5000))
    file.flush()
    assert subprocess.run(["cat", "cache.incomplete/data.arrow"], capture_output=True).stdout[:6] == b"ARROW1"
os.rename("cache.incomplete", "cache")
assert subprocess.run(["wc", "-c", "cache/data.arrow"], capture_output=True).stdout.split()[0] == b"5006"
subprocess.run(["cp", "cache/data.arrow", "copy.arrow"], check=True)
with sqlite3.connect("base.db") as base:
    base.execute("create table t (n)")
os.rename("base.db", "moved.db")
assert subprocess.run(["cat", "moved.db"], capture_output=True).stdout.startswith(b"SQLite")
""",
        str(tmp_path),
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause
    assert "redirected_files" not in run.result
    assert (tmp_path / "cache" / "data.arrow").stat().st_size == 5006
