"""A script under two versions of a package: real simulated runs, the verdict, what differs, and where."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_packages import COPIES, FAILS, NOTHING, SLOWER, environment, script, wheel

from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.answers.upgrade import environments
from fsdpbench.answers.upgrade.environments import Environment
from fsdpbench.answers.upgrade.runs import Run, Tried, Upgrade, bisect, compared, run_in
from fsdpbench.base.errors import CannotJudgeError
from fsdpbench.reports.result import Result


def packages(**versions: str) -> Environment:
    return Environment(
        "python", "3.11.7", {name: f"{name}=={version}" for name, version in versions.items()}, {}
    )


OLD, NEW = packages(tiny="1", other="1", same="1"), packages(tiny="2", other="2", same="1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, fsdpbench: Any) -> dict[str, Run]:
    """One script beside each version of a module."""
    found = {}
    for name, body in {"from": NOTHING, "to": SLOWER}.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "tiny.py").write_text(body)
        words = ("--script", str(script(folder, "tiny")), "--gpus", "8", "-o", str(folder / "run"))
        done = fsdpbench("run", *words, "--json")
        found[name] = run_in(folder / "run", Result.of(json.loads(done.stdout)))
    return found


def test_a_slower_version_is_worse_and_the_causes_have_lines(
    runs: dict[str, Run], matches_schema: Callable[[str, Any], None]
) -> None:
    before, after = runs["from"], runs["to"]
    comparison = compared(before, after, Thresholds())
    tried = [Tried(["tiny"], worse=["copies"]), Tried(["other"], skipped="pip refuses it")]
    answer = Upgrade("train.py", (OLD, NEW), (before, after), comparison, tried)
    text = answer.as_text()
    assert "packages that differ: other==1 -> other==2, tiny==1 -> tiny==2\n" in text
    for part in (
        "cause: 1 more all-gathers a step",
        "more copies a step",
        "more memory at the peak",
        "all-gather: 4 -> 5 a step",
        "peak in other phases",
        "tiny.py:10: 0 -> 1 a step",
        "  tiny: worse: copies\n  other: skipped: pip refuses it\n",
        "executed: ",
        "1 configuration compared: ",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) < 140
    content = json.loads(json.dumps(answer.to_dict()))
    matches_schema("upgrade", content)
    assert content["packages"] == {
        name: {"from": f"{name}==1", "to": f"{name}==2"} for name in ("other", "tiny")
    }
    assert content["step"]["memory_bytes"]["peak_in_backward"]["before"] > 0
    assert content["step"]["cpu_s"]["operators"]["after"] > content["step"]["cpu_s"]["operators"]["before"]
    same = Upgrade("train.py", (OLD, OLD), (before, before), compared(before, before, Thresholds()), None)
    assert same.as_text().endswith("May be upgraded: nothing is worse.")
    assert "packages that differ: none" in same.as_text()


class Pip:
    """Makes environments out of lines, and refuses `other` 2 without `tiny` 2."""

    def environment(self, wanted: environments.Wanted) -> Environment:
        asked = dict(line.split("==") for line in wanted.requirements)
        if asked["other"] == "2" and asked["tiny"] == "1":
            raise CannotJudgeError("pip refuses other==2")
        return packages(**asked)


class Runs:
    """Runs that are slower with `tiny` 2."""

    def __init__(self, runs: dict[str, Run]) -> None:
        self.runs = runs

    def run(self, environment: Environment, folder: Path, label: str) -> Run:
        return self.runs["to" if environment.packages["tiny"] == "tiny==2" else "from"]


def test_bisection_names_the_package_and_takes_what_it_needs(runs: dict[str, Run], tmp_path: Path) -> None:
    judge = partial(compared, runs["from"], thresholds=Thresholds())
    pip: Any = Pip()
    program: Any = Runs(runs)
    tiny, other = bisect(pip, program, (OLD, NEW), judge, tmp_path, ["tiny"])
    assert tiny.packages == ["tiny"]
    assert "all_gather_count" in tiny.worse
    assert other == Tried(["other"], skipped="pip refuses other==2")
    needing = Environment("python", "3.11.7", NEW.packages, {"other": ("tiny",)})
    found = list(bisect(pip, program, (OLD, needing), judge, tmp_path, ["other"]))
    assert [each.packages for each in found] == [["other", "tiny"]]
    assert found[0].worse == tiny.worse
    halved = list(bisect(pip, program, (OLD, NEW), judge, tmp_path, []))
    assert [each.packages for each in halved] == [["other", "tiny"], ["other"], ["tiny"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which script? fsdpbench upgrade train.py --from"),
        (("{script}",), "--from torch==2.13.0 or --python-from PATH: give one of them"),
        (("{script}", "--from", "torch==2.11.0"), "--to torch==2.13.0 or --python-to PATH"),
        (("{script}", "--from", "a", "--python-from", "p", "--to", "b"), "give one of them"),
        (("{script}", "--python-from", "none", "--python-to", "none"), "none: cannot be started"),
        (("{script}", "--from", "a", "--to", "b", "--hardware", "h999"), "h999"),
        (("gone.py", "--from", "a", "--to", "b"), "gone.py"),
        (("{script}", "--from-constraints", "gone.txt", "--to", "b"), "gone.txt"),
    ],
)
def test_a_bad_request_is_one_line(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(script(tmp_path, "tiny"))
    done = fsdpbench("upgrade", *(word.format(script=path) for word in words), "--cache", str(tmp_path / "c"))
    assert done.returncode in (2, 3)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_the_command_compares_interpreters(fsdpbench: Any, tmp_path: Path) -> None:
    path = script(tmp_path, "tiny")
    bodies = {"1": NOTHING, "2": SLOWER, "3": FAILS}
    pythons = {v: str(environment(tmp_path / v, ("tiny", v, body))) for v, body in bodies.items()}
    pythons["bare"] = str(environment(tmp_path / "bare", shares=False))

    def upgrade(old: str, new: str, *words: str) -> Any:
        sides = ("--python-from", pythons[old], "--python-to", pythons[new])
        return fsdpbench("upgrade", str(path), *sides, "--gpus", "8", *words)

    worse = upgrade("1", "2", "--json", "--keep", str(tmp_path / "kept"))
    content = json.loads(worse.stdout)
    assert worse.returncode == 1
    assert "more_all_gathers" in [each["cause"] for each in content["comparison"]["causes"]]
    assert content["packages"] == {"tiny": {"from": "tiny==1", "to": "tiny==2"}}
    assert {each.name for each in (tmp_path / "kept").iterdir()} == {"from", "to"}
    fails = upgrade("1", "3")
    assert fails.returncode == 1
    assert "cause: it ended with error and not with ok" in fails.stdout
    assert "RuntimeError: no such feature any more" in fails.stdout
    bare = upgrade("1", "bare")
    assert bare.returncode == 2
    assert "--python-to: lacks what fsdpbench needs" in bare.stderr


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_pip_makes_the_environments_and_bisects(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "tinya", "1", NOTHING)
    wheel(wheels, "tinya", "2", COPIES)
    wheel(wheels, "tinyb", "1", NOTHING)
    wheel(wheels, "tinyb", "2", NOTHING, ("tinyc>=2",))
    wheel(wheels, "tinyc", "1", NOTHING)
    wheel(wheels, "tinyc", "2", SLOWER)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    # torch and all that fsdpbench needs are those of this process.
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_path("purelib"))
    monkeypatch.setattr(environments, "_own_needs", lambda: ())
    (tmp_path / "old.txt").write_text("tinyb==1\ntinyc==1\n")
    path = script(tmp_path, "tinya", "tinyb", "tinyc")
    common = (str(path), "--gpus", "8", "--cache", str(tmp_path / "cache"), "--json", "--with", "tinyb")
    common += ("--with", "tinyc")
    sides = ("--from", "tinya==1", "--from-constraints", str(tmp_path / "old.txt"), "--to", "tinya==2")
    done = fsdpbench("upgrade", *common, *sides, "--bisect")
    assert done.returncode == 1, done.stderr
    found = {" ".join(each["packages"]): each for each in json.loads(done.stdout)["bisection"]}
    assert "copies" in found["tinya"]["worse"]
    assert "all_gather_count" not in found["tinya"]["worse"]
    assert "all_gather_count" in found["tinyb tinyc"]["worse"]  # pip refuses tinyb alone
    assert "all_gather_count" in found["tinyc"]["worse"]
    made = sorted((tmp_path / "cache").glob("*.json"))
    assert len(made) >= 4
    again = environments.Cache(tmp_path / "cache", pytest.fail)
    words = ("tinya==1", "tinyb", "tinyc")
    found = again.environment(environments.Wanted("from", words, tmp_path / "old.txt"))
    assert found.packages == {"tinya": "tinya==1", "tinyb": "tinyb==1", "tinyc": "tinyc==1"}
    gone = fsdpbench("upgrade", *common, "--from", "tinya==9", "--to", "tinya==2")
    assert gone.returncode == 3
    assert "pip fails: Could not find a version that satisfies the requirement tinya==9" in gone.stderr
    assert sorted((tmp_path / "cache").glob("*.json")) == made
