"""Runs test functions in processes of their own that have the simulated device.

Starting the device changes torch for the whole process, which tests of other parts must not see. This server
imports torch and registers the device once; each test runs in a fork of it, which costs some milliseconds.

Protocol on stdin and stdout: a pickle ``(file, function, arguments)`` in, ``None`` or a traceback's text out.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import select
import signal
import sys
import traceback
from pathlib import Path

TIMEOUT_SECONDS = 120


def serve() -> None:
    """Answer requests until stdin ends."""
    import torch
    import torch.distributed.fsdp

    from fsdpbench.sim import preload

    torch.set_num_threads(1)
    preload()
    gc.freeze()  # modules stay: a fork that looked for garbage among them would copy all of their pages
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tests print must not get between the answers
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(run_in_fork(*request), answers)
        answers.flush()


def run_in_fork(file: str, function: str, arguments: dict[str, object]) -> str | None:
    """Run one test in a child; None if it passed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        failure = None
        try:
            run(file, function, arguments)
        except BaseException:
            failure = traceback.format_exc()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(failure, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        if not select.select([pipe], [], [], TIMEOUT_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"{function} has not ended after {TIMEOUT_SECONDS} s"
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if not content:
        return f"{function}: the process ended with status {status} and said nothing"
    return pickle.loads(content)


def run(file: str, function: str, arguments: dict[str, object]) -> None:
    """Import a test's file and call it."""
    sys.path[:0] = [str(Path(file).parent), str(Path(__file__).parent)]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)(**arguments)


if __name__ == "__main__":
    serve()
