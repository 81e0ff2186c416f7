"""Drawn sequences of file operations, and what each of them sees: run on simulated GPUs and by plain Python.

    python file_programs.py FOLDER FIRST LAST lay COPY...     what was there before, and copies; then `cpu`
    python file_programs.py FOLDER FIRST LAST cpu|cuda        one line of JSON for each sequence
    python file_programs.py FOLDER FIRST LAST layer RUNS      the same through the layer over files alone

Each sequence runs in a folder of its own, in which some files were there before. Plain files begin with `P:`.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

BEFORE = ("a.bin", "b.txt", "old/a.bin", "old/t.pt", "old/c.txt", "base.db", "t.pt", "plain/x.bin")
NAMES = (
    "a.bin",
    "b.txt",
    "n.bin",
    "old/a.bin",
    "old/n.txt",
    "plain/x.bin",
    "plain/n.bin",
    "new/n.bin",
    "new/m.txt",
)
TENSORS = ("t.pt", "old/t.pt", "new/t.pt", "n.pt", "new/inner/t.pt", "made.pt")
FOLDERS = ("old", "plain", "new", "moved", "new/inner")
READERS = ("new", "moved", "plain")


def lay(folder: Path) -> None:
    """Make the files that are there before the run."""
    for name in BEFORE:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".pt"):
            torch.save({"w": torch.ones(3000)}, path)
        elif name.endswith(".db"):
            with sqlite3.connect(path) as base:
                base.execute("create table t (n)")
            base.close()
        else:
            path.write_bytes(b"P:before " + name.encode())


class Sequence:
    """One drawn sequence. `seen`: what each operation returned or raised."""

    def __init__(self, seed: int, device: str) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.seen: list[Any] = []
        self.guarded: set[str] = set()  # folders with tensors: other programs see old files from before
        self.replaced: set[str] = set()  # folders with a checkpoint from before that were removed

    def run(self, steps: int) -> list[Any]:
        operations = [getattr(self, name) for name in sorted(vars(Sequence)) if name.startswith("op_")]
        for _ in range(steps):
            operation: Callable[[], Any] = self.random.choice(operations)
            try:
                answer = operation()
            except (OSError, sqlite3.Error, RuntimeError) as error:
                answer = type(error).__name__
            self.seen.append([operation.__name__, answer])
        self.seen.append(["tree", self.tree()])
        return self.seen

    def tree(self) -> dict[str, Any]:
        """Return all files, by every reader."""
        found: dict[str, Any] = {}
        for folder, folders, names in os.walk("."):
            folders.sort()
            found[folder] = sorted(os.listdir(folder)) == sorted(entry.name for entry in os.scandir(folder))
            for name in sorted(names):
                found[os.path.join(folder, name)] = self.content(os.path.join(folder, name))
        return found

    def content(self, path: str) -> Any:
        """Return a file's content: the text of plain ones, the shape of tensors."""
        path = os.path.normpath(path)
        with open(path, "rb") as file:
            data = file.read()
        if path.endswith(".db"):
            base = sqlite3.connect(path)
            rows = [row[0] for row in base.execute("select n from t")]
            base.close()
            return rows
        if not data.startswith(b"P:"):
            try:
                return self.shape(path, data)
            except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError, OSError):
                return "damaged"
        text = "text over the start of tensors" if b"\0" in data else data.decode("latin1")
        folder = os.path.dirname(path)
        if not {folder, path} & self.replaced and (folder not in self.guarded or path not in BEFORE):
            number = os.open(path, os.O_RDONLY)
            assert os.read(number, 1 << 20) == data
            with mmap.mmap(number, 0, access=mmap.ACCESS_READ) as mapped:
                assert mapped[:] == data
            os.close(number)
            if subprocess.run(["cat", path], capture_output=True).stdout != data:
                return "another program sees another file"
        return text

    def shape(self, path: str, data: bytes) -> Any:
        if data[:6] == b"\x93NUMPY":
            return list(np.load(path).shape)
        if data[257:262] == b"ustar":
            with tarfile.open(path) as archive:
                member = archive.extractfile(archive.getnames()[0])
                assert member is not None
                data = member.read()
            return list(torch.load(io.BytesIO(data), map_location="cpu")["w"].shape)
        if data[:2] == b"PK":
            return list(torch.load(path, map_location="cpu")["w"].shape)
        return len(pickle.loads(data))

    def plain(self) -> bytes:
        return b"P:%d " % self.random.randrange(10**6) * self.random.randrange(1, 500)

    def name(self, names: tuple[str, ...] = NAMES) -> str:
        return self.random.choice(names)

    def tensor_name(self) -> str:
        name = self.random.choice(TENSORS)
        self.guarded.add(os.path.dirname(name))
        return name

    def state(self) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(3000, device=self.device)}

    # -------------------------------------------------------------------------------------- plain files

    def op_write(self) -> None:
        mode = self.random.choice(["wb", "wb", "w+b", "ab", "r+b", "xb"])
        with open(self.name(), mode, buffering=self.random.choice([-1, 0, 4096])) as file:
            file.write(self.plain())

    def op_write_text(self) -> None:
        with open(self.name(), self.random.choice(["w", "w", "a", "r+", "x"])) as file:
            file.write(self.plain().decode())

    def op_path_write(self) -> None:
        Path(self.name()).write_bytes(self.plain())

    def op_os_open(self) -> None:
        flags = self.random.choice(
            [os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL, 0, os.O_TRUNC]
        )
        number = os.open(self.name(), os.O_WRONLY | flags)
        os.write(number, self.plain())
        os.close(number)

    def op_memory_map(self) -> None:
        name = self.name()
        data = self.plain()
        array = np.memmap(name, dtype="uint8", mode="w+", shape=(len(data),))
        array[:] = np.frombuffer(data, dtype="uint8")
        array.flush()

    def op_change_map(self) -> None:
        array = np.memmap(self.name(), dtype="uint8", mode="r+")
        array[2:] = ord("7")
        array.flush()

    def op_sqlite(self) -> Any:
        name = self.random.choice(["base.db", "plain/n.db", "new/n.db"])
        base = sqlite3.connect(name)
        try:
            with base:
                base.execute("create table if not exists t (n)")
                base.execute("insert into t values (?)", [self.random.randrange(100)])
            return base.execute("select count(*) from t").fetchone()[0]
        finally:
            base.close()

    def op_whole(self) -> None:
        """Write a temporary file that takes the place of another."""
        name = self.name()
        number, temporary = tempfile.mkstemp(dir=os.path.dirname(name) or ".")
        with os.fdopen(number, "wb") as file:
            file.write(self.plain())
        os.chmod(temporary, 0o644)
        os.replace(temporary, name)

    def op_folder_like_datasets(self) -> None:
        """Write into a folder that is renamed when it is complete."""
        target = self.name(READERS)
        os.makedirs("part.incomplete")
        try:
            with open("part.incomplete/d.bin", "wb") as file:
                file.write(self.plain())
            Path("part.incomplete/d.json").write_text("P:{}")
            if os.path.isdir(target):
                shutil.rmtree(target)
            os.rename("part.incomplete", target)
        finally:
            shutil.rmtree("part.incomplete", ignore_errors=True)

    def op_program_writes(self) -> None:
        name = self.random.choice(["new/p.bin", "plain/p.bin"])
        subprocess.run(f"printf P:program > {name}", shell=True, stderr=subprocess.DEVNULL)

    # ------------------------------------------------------------------------------------------ tensors

    def op_save(self) -> None:
        torch.save(self.state(), self.tensor_name())

    def op_save_open(self) -> None:
        with open(self.tensor_name(), "wb") as file:
            torch.save(self.state(), file)

    def op_save_whole(self) -> None:
        self.guarded.add("")
        torch.save(self.state(), "made.tmp")
        os.replace("made.tmp", self.tensor_name())

    def op_save_by_number(self) -> None:
        self.guarded.add("")
        name = self.tensor_name()
        number, temporary = tempfile.mkstemp(dir=".")
        with os.fdopen(number, "wb") as file:
            torch.save(self.state(), file)
        try:
            os.replace(temporary, name)
        except OSError:
            os.remove(temporary)
            raise

    def op_save_bytes(self) -> None:
        buffer = io.BytesIO()
        torch.save(self.state(), buffer)
        Path(self.tensor_name()).write_bytes(buffer.getvalue())

    def op_array(self) -> None:
        with open(self.tensor_name(), "wb") as file:
            np.save(file, self.state()["w"].cpu().numpy())

    def op_pickle(self) -> None:
        with open(self.tensor_name(), "wb") as file:
            pickle.dump([self.state()["w"].cpu().numpy()], file)

    def op_archive(self) -> None:
        """Write an archive, by the `open` that its module imported before."""
        buffer = io.BytesIO()
        torch.save(self.state(), buffer)
        member = tarfile.TarInfo("w.pt")
        member.size = buffer.tell()
        buffer.seek(0)
        with tarfile.open(self.tensor_name(), "w") as archive:
            archive.addfile(member, buffer)

    def op_rotate(self) -> None:
        """Write a checkpoint's folder over the one before."""
        self.guarded |= {"old", "part"}
        self.replaced.add("old")
        os.makedirs("part")
        try:
            Path("part/c.txt").write_text("P:step")
            torch.save(self.state(), "part/t.pt")
            if os.path.isdir("old"):
                shutil.rmtree("old")
            os.rename("part", "old")
        finally:
            shutil.rmtree("part", ignore_errors=True)

    # --------------------------------------------------------------------------------------------- both

    def op_remove(self) -> None:
        os.remove(self.random.choice(NAMES + TENSORS))

    def two_names(self) -> tuple[str, str]:
        """Return a file and where to put it: no plain file takes a checkpoint's name."""
        first, second = (self.random.choice([NAMES, TENSORS]) for _ in range(2))
        return self.random.choice(first), self.random.choice(NAMES if first is NAMES else second)

    def op_rename(self) -> None:
        source, target = self.two_names()
        if os.path.exists(source) and source != target:
            self.guarded.add(os.path.dirname(target))
            os.replace(source, target)

    def op_rename_folder(self) -> None:
        source, target = (
            self.name(("new", "moved", "new/inner")),
            self.name(("new", "moved", "plain", "n.bin")),
        )
        if os.path.isdir(source) and not target.startswith(source):
            self.guarded |= {target, "new/inner"}
            os.rename(source, target)

    def op_rename_over_folder(self) -> None:
        source, target = self.random.choice(NAMES + TENSORS), self.name(FOLDERS)
        if os.path.isdir(target):
            os.replace(source, target)

    def op_copy(self) -> None:
        source, target = self.two_names()
        if source != target:
            self.guarded.add(os.path.dirname(target))
            self.random.choice([shutil.copy, shutil.copyfile, shutil.copy2])(source, target)

    def op_link(self) -> None:
        os.link(self.name(("n.bin", "new/n.bin")), self.name(("l.bin", "new/l.bin")))

    def op_make_folder(self) -> None:
        self.random.choice([os.mkdir, os.makedirs])(self.name(FOLDERS))

    def op_remove_tree(self) -> None:
        name = self.name(FOLDERS)
        self.replaced |= {name} & {"old"}
        shutil.rmtree(name)

    def op_read(self) -> Any:
        return self.content(self.random.choice(NAMES + TENSORS))

    def op_look(self) -> Any:
        name = self.random.choice(NAMES + TENSORS + FOLDERS)
        return [os.path.exists(name), os.path.isdir(name), os.path.islink(name), os.access(name, os.R_OK)]


def through_layer(seed: int, runs: Path) -> list[Any]:
    """Run a sequence as a simulated script sees its files, with tensors of the CPU for those of a device."""
    from fsdpbench.script.files import ScriptFiles

    run = runs / str(seed)
    run.mkdir(parents=True)
    device: Any = SimpleNamespace(copied_to_host=True)
    files = ScriptFiles(run, device, keeps_all=False)
    files.install()
    try:
        return Sequence(seed, "cpu").run(steps=14)
    finally:
        files.settle()


def main(folder: str, first: str, last: str, device: str, *others: str) -> None:
    whole = Path(folder).absolute()
    if device == "lay":
        for seed in range(int(first), int(last)):
            lay(whole / str(seed))
        for copy in others:
            shutil.copytree(whole, copy)
        device, others = "cpu", ()
    for seed in range(int(first), int(last)):
        os.chdir(whole / str(seed))
        seen = through_layer(seed, Path(*others)) if others else Sequence(seed, device).run(steps=14)
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
