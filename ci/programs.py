"""Public training programs on simulated GPUs: environments, runs, and the table `docs/programs.md`.

    python ci/programs.py FOLDER                   all of ci/programs/*.toml; makes environments in FOLDER
    python ci/programs.py FOLDER --only trl-sft    some programs; the rows of the others stay
    python ci/programs.py FOLDER --environment hf=PATH    use an environment that is there already
    python ci/programs.py FOLDER --sanitize        each program again, with `fsdpbench run --sanitize`
    python ci/programs.py FOLDER --table           write the table of the results in ci/measured/programs

A program is a row of a file in `ci/programs` (huggingface.toml explains the columns). Its folder in
`ci/programs`, if it has one, is copied to where it runs; `prepare.py` of that folder (or the `prepare` of the
row) makes its data and random weights first. `command` is what comes after `fsdpbench run`; `{python}`,
`{scripts}` and `{site}` are the environment's interpreter, its folder of commands and its packages' folder.
Nothing is downloaded but packages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
PROGRAMS = CHECKOUT / "ci" / "programs"
RESULTS = CHECKOUT / "ci" / "measured" / "programs"
PAGE = CHECKOUT / "docs" / "programs.md"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}
HEAD = """<!-- Made by python ci/programs.py: do not edit. -->
# Public programs that were tried

Each program runs unmodified on simulated GPUs, with random weights and small data made on the spot.
`python ci/programs.py FOLDER` makes the environments, runs all and writes this page. "Its example":
*in the package* (the installed file is started) or *as documented* (written as its documentation shows).

"Ready" is the processor time of the whole run, imports included. MFU is empty where dtypes are mixed.

"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=None, metavar="NAME")
    parser.add_argument("--environment", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    known = dict(pair.split("=", 1) for pair in given.environment)
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    wanted = set(given.only or [])
    for path in sorted(PROGRAMS.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        kept = RESULTS / f"{path.stem}.json"
        found = json.loads(kept.read_text()) if kept.exists() else {}
        for row in table["program"]:
            rows.append(row)
            name, environment = row["name"], row["environment"]
            if given.table or (given.only is not None and name not in wanted):
                continue
            wanted.discard(name)
            before = found.get(name, {}) if given.sanitize else {}
            try:
                place = environment_of(
                    folder, environment, table["environment"][environment], known.get(environment)
                )
                found[name] = before | run(folder, place, row, sanitize=given.sanitize)
            except subprocess.CalledProcessError as error:
                found[name] = {"status": "not prepared", "cause": str(error)}
            print(f"{name}: {json.dumps(found[name])}", flush=True)
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        results |= found
    if wanted and not given.table:
        sys.exit(f"no such program: {', '.join(sorted(wanted))}")
    PAGE.write_text(page(rows, results))


def environment_of(folder: Path, name: str, wanted: dict[str, Any], there: str | None) -> Path:
    """Return the folder of a virtual environment with the packages `wanted`; make it if it is not there."""
    if there is not None:
        return Path(there).resolve()
    place = folder / "environments" / name
    if not (place / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [str(place / "bin" / "pip"), "install", "-q"]
        torch = wanted.get("torch", "torch==2.13.0")
        subprocess.run([*pip, torch, *wanted["packages"]], check=True)
        if wanted.get("without_dependencies"):
            subprocess.run([*pip, "--no-deps", *wanted["without_dependencies"]], check=True)
        alone = ["--no-deps"] if "torch" in wanted else []  # a torch that fsdpbench does not ask for
        subprocess.run([*pip, *alone, "-e", CHECKOUT, torch], check=True)
        if wanted.get("without"):
            subprocess.run([place / "bin" / "pip", "uninstall", "-q", "-y", *wanted["without"]], check=True)
        (place / "made").touch()
    return place


def run(folder: Path, environment: Path, row: dict[str, Any], *, sanitize: bool) -> dict[str, Any]:
    """Run one program in a fresh folder; return its figures as in the table."""
    work = folder / "work" / row["name"]
    shutil.rmtree(work, ignore_errors=True)
    own = PROGRAMS / row.get("folder", row["name"])
    shutil.copytree(own, work) if own.is_dir() else work.mkdir(parents=True)
    variables = {**os.environ, **OFFLINE, "HF_HOME": str(work / "home"), **row.get("variables", {})}
    python = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*")) / "site-packages"
    for script in [own / "prepare.py", *(PROGRAMS / name for name in row.get("prepare", []))]:
        if script.exists():
            subprocess.run([python, script], cwd=work, env=variables, check=True)
    names = {"python": str(python), "scripts": str(environment / "bin"), "site": str(site)}
    words = [word.format(**names) for word in row["command"]]
    end = words.index("--") if "--" in words else len(words)
    words[end:end] = [*(["--sanitize"] if sanitize else []), "-o", "runs", "--json"]
    command = [environment / "bin" / "fsdpbench", "run", *words]
    began = time.monotonic()
    ended = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True)
    (work / "stderr.txt").write_text(ended.stderr)
    try:
        result = json.loads(ended.stdout)
    except ValueError:
        lines = ended.stderr.strip().splitlines() or ["no output"]
        return {"status": "error", "cause": lines[-1], "exit_code": ended.returncode}
    (work / "result.json").write_text(ended.stdout)
    if sanitize:
        findings = (result.get("sanitizer") or {}).get("findings") if result["status"] == "ok" else None
        return {
            "sanitizer_findings": None if findings is None else len(findings),
            "sanitize_status": result["status"],
        }
    peak = result.get("peak_memory_bytes") or {}
    return {
        "status": result["status"],
        "cause": (result.get("cause") or {}).get("message"),
        "versions": _versions(python, row["packages"]),
        "gpus": result["config"]["gpus"],
        "hardware": result["config"]["hardware"],
        "step_time_s": result.get("step_time_s"),
        "allocated_bytes": peak.get("allocated"),
        "reserved_bytes": peak.get("reserved"),
        "mfu": result.get("mfu"),
        "cpu_s": (result.get("bench") or {}).get("cpu_s"),
        "wall_s": round(time.monotonic() - began, 1),
        "compiled": result.get("compiled"),
        "unknown_operators": sorted(result.get("unknown_operators") or {}),
        "decisions": len(result.get("placeholder_decisions") or []),
    }


def _versions(python: Path, packages: list[str]) -> dict[str, str]:
    text = (
        "import sys,json,importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", text, *packages], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def page(rows: list[dict[str, Any]], results: dict[str, Any]) -> str:
    """Return the text of `docs/programs.md`."""
    known = [(row, results[row["name"]]) for row in rows if row["name"] in results]
    good = [(row, found) for row, found in known if found["status"] == "ok"]
    times = sorted(found["cpu_s"] for _, found in good if found.get("cpu_s"))
    median = f", {times[len(times) // 2]:.0f} s of processor time in the median" if times else ""
    lines = [HEAD + f"{len(good)} of {len(known)} run{median}.\n"]
    lines += [
        "| program | versions | its example | GPUs | step, ms | GiB allocated | GiB reserved | MFU "
        "| ready, s |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row, found in good:
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        mfu = "" if found["mfu"] is None else f"{found['mfu']:.1%}"
        memory = [f"{(found[f'{kind}_bytes'] or 0) / 2**30:.2f}" for kind in ("allocated", "reserved")]
        lines.append(
            f"| {row['title']} | {versions} | {row['example']} | {found['gpus']} × {found['hardware']} | "
            f"{1e3 * found['step_time_s']:,.1f} | {memory[0]} | {memory[1]} | {mfu} | "
            f"{found['cpu_s'] or 0:.0f} |"
        )
    notes = [(row, row["needed"]) for row, _ in good if row.get("needed")]
    if notes:
        lines += ["\n## What they needed\n", *(f"- {row['title']}: {needed}" for row, needed in notes)]
    slow = [(row, found) for row, found in good if (found.get("cpu_s") or 0) > 30 and row.get("slow")]
    if slow:
        lines += [
            "\n## What takes longer than 30 s\n",
            *(f"- {row['title']}: {row['slow']}" for row, _ in slow),
        ]
    bad = [(row, found) for row, found in known if found["status"] != "ok"]
    if bad:
        lines += ["\n## What does not run\n", "| program | why |", "|---|---|"]
        lines += [f"| {row['title']} | {row.get('why') or _cell(found['cause'])} |" for row, found in bad]
    checked = [found for _, found in good if "sanitizer_findings" in found]
    if checked:
        ended = [found["sanitizer_findings"] for found in checked if found["sanitize_status"] == "ok"]
        refused = len(checked) - len(ended)
        lines += [
            f"\n`--sanitize`: {ended.count(0)} of {len(ended)} programs without a finding"
            + (
                f"; {refused} do not run under it (it refuses compiled parts and pipelines)."
                if refused
                else "."
            )
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "\\<")[:300]


if __name__ == "__main__":
    main()
