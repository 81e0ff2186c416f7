"""What all tests share: which cases are the campaign's, a browser, no skip for want of a package in CI."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

# Hundreds of tests start an interpreter; without bytecode each compiles the sources again, 0.3 to 0.6 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the campaign what `plain_cases` does not name, and benchmarks that nobody times.

    `@pytest.mark.plain_cases("bf16")` keeps the cases whose id contains one of the texts in the plain suite.
    """
    timing = config.getoption("benchmark_enable", default=False)
    unmatched: dict[tuple[str, str], bool] = {}
    for item in items:
        if "benchmarks" in item.path.parts and not timing:
            item.add_marker(pytest.mark.campaign)
        for mark in item.iter_markers("plain_cases"):
            case = item.name.partition("[")[2]
            if not any(text in case for text in mark.args):
                item.add_marker(pytest.mark.campaign)
            for text in mark.args:
                key = (item.nodeid.partition("[")[0], text)
                unmatched[key] = unmatched.get(key, True) and text not in case
    named = any("[" in argument for argument in config.args)
    wrong = [f"{name}: no case has '{text}' in its id" for (name, text), none in unmatched.items() if none]
    if wrong and not named:
        raise pytest.UsageError("plain_cases: " + "; ".join(wrong))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay: looking for garbage among them takes an eighth of the time to collect them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With FSDPBENCH_FORBID_SKIPS=1, as in CI, a test that asks for a missing Debian package fails."""
    report = yield
    forbidden = os.environ.get("FSDPBENCH_FORBID_SKIPS") == "1"
    if forbidden and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "Debian package" in reason:
            report.outcome = "failed"
            report.longrepr = f"skips are forbidden here: {reason}"
    return report


_INTO_FILES = """
import os, sys
for number in (1, 2):
    os.dup2(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT, 0o600), number)
sys.argv = ["-c", *arguments]
"""
Forks = Callable[..., list["subprocess.CompletedProcess[str]"]]


@pytest.fixture(scope="session")
def in_forks(tmp_path_factory: pytest.TempPathFactory) -> Forks:
    """Runs a program in processes of the fork server, which has imported torch: a second less for each.

    `in_forks(program, [words, ...])` starts a process for each list of words, all at a time, and returns what
    they wrote. Its environment is the server's: what a program needs of it, it sets itself.
    """
    from fsdpbench.launch import fork_server

    def run(
        program: str, each: list[list[str]], timeout: float = 120
    ) -> list[subprocess.CompletedProcess[str]]:
        fork_server.ensure()
        folder = tmp_path_factory.mktemp("forks")
        started = []
        for index, arguments in enumerate(each):
            (folder / str(index)).mkdir()
            names = {"folder": str(folder / str(index)), "arguments": arguments, "__name__": "__main__"}
            started.append(fork_server.context().Process(target=exec, args=(_INTO_FILES + program, names)))
            with fork_server.plain_main():
                started[-1].start()
        for process in started:
            process.join(timeout)
        ended = [process.exitcode for process in started]
        for process in started:
            process.kill()
        outputs = [[(folder / f"{i}/{number}").read_text() for number in (1, 2)] for i in range(len(each))]
        assert None not in ended, f"still running after {timeout} s: {outputs}"
        return [
            subprocess.CompletedProcess(words, int(code or 0), *both)
            for words, code, both in zip(each, ended, outputs, strict=True)
        ]

    return run


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Debian's chromium under playwright, its profile in a directory of its own."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs Debian's chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (the extra `test`)")
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    switches += ["--disable-component-update", "--disable-sync"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=switches, timeout=60_000)
        yield browser
        browser.close()
