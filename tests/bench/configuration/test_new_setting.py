"""A new setting is a row and a table of texts: the recipe of CONTRIBUTING.md, carried out on copies.

The row is put into the source of `settings/table.py` and the table into what it reads of `settings.toml`,
before anything imports them; nothing else changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROW = """
    pace: int = row(3, words_or({"off": 0}, whole(0)), {"impl-fsdp2": code.argument("pace")})
"""
TEXTS = """
[pace]
meaning = "Strides that the planted setting takes."
reason = "Three keep step."
takes = "off, or strides (at least 1)"
example = ["3", "5"]
sweep = { memory = [3, 5] }
[[pace.trades]]
value = 1
meaning = "shorter strides"
of = [3]
memory = "less"
time = "more"
fsdp2 = "pace(1)"
variation = "paced"
against = ["alloc_retries"]
"""
PLANTED = """
import importlib.machinery, importlib.util, sys

class Planted(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        read = 'table_beside(__file__, "settings.toml")'
        source = open(self.path).read()
        assert source.count(read) == 1
        source = source.replace(read, f"{read} | __import__('tomllib').loads({TEXTS!r})")
        before, found, after = source.partition("    seed: int = row(")
        assert found
        return compile(before + ROW + "\\n" + found + after, self.path, "exec")

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "fsdpbench.base.settings.table":
            place = f"{path[0]}/table.py"
            return importlib.util.spec_from_file_location(name, place, loader=Planted(name, place))

sys.meta_path.insert(0, Finder())
"""


def planted(program: str, *arguments: str, folder: Path) -> str:
    """What a program prints that runs with the setting planted."""
    text = f"ROW = {ROW!r}\nTEXTS = {TEXTS!r}\n{PLANTED}\n{program}"
    command = [sys.executable, "-c", text, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMANDS = """
import contextlib
from fsdpbench.cli import main

for words in sys.argv[1:]:
    sys.argv = ["fsdpbench", *words.split()]
    with contextlib.suppress(SystemExit):
        main()
    print("end of it", flush=True)
"""


def printed_by(*commands: str, folder: Path) -> list[str]:
    """What each command prints, one after another in one process with the setting planted."""
    *found, rest = planted(COMMANDS, *commands, folder=folder).split("end of it\n")
    assert not rest
    return found


def test_it_is_listed_and_has_a_flag(tmp_path: Path) -> None:
    helps = [f"{command} --help-all" for command in ("sweep", "plan", "tune", "run")]
    listed, *lists, single = printed_by("list settings --json", *helps, folder=tmp_path)
    (row,) = (r for r in json.loads(listed) if r["name"] == "pace")
    assert (row["default"], row["reason"]) == (3, "Three keep step.")
    assert len(lists) == 3
    meaning = "Strides that the planted setting takes, e.g."
    assert all(f"{meaning} 5 or 3,5. Default: 3." in " ".join(printed.split()) for printed in lists)
    assert f"{meaning} 5. Default: 3." in " ".join(single.split())


def test_spaces_and_presets_sweep_it(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        'model = "gpt-tiny"\nsystem = "impl-fsdp2"\n[settings]\npace = [1, "off"]\n'
    )
    of_space, of_preset = printed_by(
        "plan space.toml --no-predict --json",
        "plan --model gpt-tiny --preset memory --no-predict --json",
        folder=tmp_path,
    )
    points = json.loads(of_space)["points"]
    assert [point["config"]["settings"]["pace"] for point in points] == [1, 0]
    points = json.loads(of_preset)["points"]
    assert {point["config"]["settings"]["pace"] for point in points} == {3, 5}


REST = """
import json
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.answers.explain.advice import changes_for
from fsdpbench.reports.analysis.model import Finding, Outcome, Verdict, in_torch, remedies
from fsdpbench.base.settings import Settings
from fsdpbench.sweep.snippets import snippets

config = Config(
    model="gpt-tiny", shape={}, system="impl-fsdp2", device="sim", hardware="a100-80gb", gpus=2,
    gpus_per_node=2, settings=Settings.of(), measurement=Measurement.default_for("sim"),
)
older = Settings().to_dict()
del older["pace"]
found = remedies("alloc_retries")
print(json.dumps({
    "older": Settings.from_record(older).pace,
    "changes": [change.write for change in changes_for(config)],
    "code": snippets([config])["best_impl_fsdp2.py"],
    "remedies": [each.to_dict() for each in found],
    "torch": list(in_torch(Verdict(Outcome.FOUND, "", (Finding("", 1.0, None, "", found),)))),
}))
"""


def test_it_is_tried_suggested_and_written_as_code(tmp_path: Path) -> None:
    found = json.loads(planted(REST, folder=tmp_path))
    assert found["older"] == 3, "records from before the row ran its default"
    assert "--pace 1" in found["changes"]
    assert "        pace=3,\n" in found["code"]
    assert {"setting": "pace", "value": "1"} in found["remedies"]
    assert "pace(1)" in found["torch"]
