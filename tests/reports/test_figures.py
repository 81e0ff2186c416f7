"""The table of figures: a new row is seen wherever figures are listed, and the schema is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fsdpbench.reports.figures import FIGURES, Judged, flat, schema
from fsdpbench.reports.pages import display
from fsdpbench.reports.result import Result

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "schemas" / "result.schema.json"

A_NEW_FIGURE = """
import contextlib, csv, io, json, sqlite3, sys
from pathlib import Path
from fsdpbench.reports import figures

row = figures.Figure(
    path="steps_per_minute", unit="1/min", worse=figures.Worse.LOWER, judged=figures.Judged.YES,
    marks=frozenset({"flat", "rate"}), column="steps/min", form="count",
    least=0.0, most=100.0, words="steps a minute",
    computed=lambda ran: None if ran.step_time is None else 60 / ran.step_time,
)
figures.FIGURES += (row,)

from fsdpbench.answers.check.compare import compare
from fsdpbench.answers.check.records.entries import entry_of
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.reports.consistency import contradiction
from fsdpbench.reports.pages import load_run, write_csv, write_json, write_markdown
from fsdpbench.engine.results.store import build_index
from fsdpbench.engine.results.records import RankRecord, Status, write_record
from fsdpbench.engine.results.result import Outcome, record_result
from fsdpbench.engine.results.store import Store
from fsdpbench.sweep.runner import merged

config = Config(
    model="gpt-tiny", shape={}, system="torch-ddp", device="cpu", hardware=None, gpus=1, gpus_per_node=1,
    settings=Settings.of(batch=1), measurement=Measurement(0, 1, 0, timeout_s=1.0),
)
store = Store.open_or_create(Path(sys.argv[1]))
with store.locked():
    store.write_space({"schema": 1}, [config])
    work = store.work_folder(config)
    record = RankRecord(0, 1, "cpu", step_times_s=[2.0], samples_per_step=1)
    write_record(record, work)
    result = record_result(config, work, Outcome(Status.OK), 1.0, "2020-01-01T00:00:00+00:00")
    folder = store.commit(config, work)
stored = json.loads((folder / "result.json").read_text())
build_index(store.folder / "index", store.points())
with contextlib.closing(sqlite3.connect(store.folder / "index")) as connection:
    indexed = connection.execute("SELECT steps_per_minute FROM results").fetchone()[0]
(exported,) = csv.DictReader(io.StringIO(write_csv(store.folder)))
slower = stored | {"steps_per_minute": 15.0}
found = compare({"a": entry_of([stored])}, {"a": entry_of([slower])}, Thresholds())
print(json.dumps({
    "result": stored["steps_per_minute"],
    "index": indexed,
    "csv": float(exported["steps_per_minute"]),
    "json": json.loads(write_json(store.folder))["configurations"][0]["steps_per_minute"],
    "page": "steps/min" in write_markdown(store.folder),
    "gate": "steps_per_minute" in [change.metric for change in found.changes],
    "range": contradiction(stored | {"steps_per_minute": 101.0}),
    "repeats": merged(result, [result.replaced(step_time_s=4.0)]).stored("steps_per_minute"),
    "schema": figures.schema()["steps_per_minute"]["description"],
}))
"""


def test_a_new_figure_is_one_row(tmp_path: Path) -> None:
    """In a process of its own, since the lists are made of the table as modules are imported."""
    done = subprocess.run(
        [sys.executable, "-c", A_NEW_FIGURE, str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    limits = "steps_per_minute is 101, and must be a number from 0 to 100"
    assert seen.pop("range") == limits
    assert seen == {
        "result": 30.0, "index": 30.0, "csv": 30.0, "json": 30.0, "page": True, "gate": True,
        "repeats": 20.0, "schema": "steps a minute",
    }  # fmt: skip


def test_the_documented_schema_of_figures_is_that_of_the_table() -> None:
    documented = json.loads(SCHEMA.read_text())["properties"]
    for name, described in schema().items():
        known = {key: documented[name][key] for key in described if key in documented[name]}
        assert known == described, name


def test_every_field_of_a_result_is_documented_and_the_other_way_round() -> None:
    printed_alone = {"advice", "explanation"}  # of `run --advise`: no file holds them
    documented = {*json.loads(SCHEMA.read_text())["properties"]} - printed_alone
    assert documented == {*Result.__struct_fields__} - {"content"}


def test_rows_are_sound() -> None:
    names = [(figure.name, figure.judged) for figure in FIGURES if figure.judged is not Judged.NO]
    assert len({name for name, _ in names}) == len(names)
    assert all(callable(getattr(display, figure.form)) for figure in FIGURES)
    assert len({figure.in_index for figure in flat()}) == len(flat()) == 18
    assert all(figure.least is not None for figure in flat())
