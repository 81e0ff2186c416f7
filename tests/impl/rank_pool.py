"""Real ranks for tests: processes that start once, join a gloo group, and run one named function after
another.

A test passes a function of its own file; each rank loads that file by path and calls the function with its
rank and the given arguments. What rank 0 returns comes back; an exception on any rank fails the test with
that rank's traceback. A rank that does not answer in time is killed with its whole pool, so nothing hangs and
nothing is left behind. If a signal such as SIGSEGV kills a rank, the function runs once more on fresh ranks,
with a warning: a rank crashed so once in CI, inside a gather of torch's own. Killed twice, it fails.

    nursery: imports once ──fork──> a pool's parent ──fork──> a keeper for each rank ──fork──> the rank
                                                                └── forks a fresh one when it has retired

One nursery serves all pools of a test process: the imports cost more than most tests.

Every process group has threads that wake up a hundred times a second, for as long as the process lives. So
ranks retire when they have gathered many.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
PRODUCTS = HERE.parent / "products"
STARTUP_SECONDS = 120
_MOST_THREADS = 40
_MOST_DESCRIPTORS = 64
_RETIRE = "retire"
_RETIRED = 17
"""Exit code of a rank that wants a successor."""
_KILLED = "killed by"


class RankCrashError(AssertionError):
    """A signal killed a rank."""


class RankPool:
    """``world_size`` ranks, started at the first use, and anew after a failure that left them anywhere.

    Args:
        join: whether they join a gloo group; otherwise the functions are on their own.
    """

    def __init__(self, world_size: int, *, join: bool = True) -> None:
        self.world_size = world_size
        self._join = join
        self._parent: int | None = None
        """Its process id, which is that of its group too."""
        self._orders: list[int] = []
        self._answers: list[int] = []
        self._tired = False

    def run(self, function: Callable[..., Any], timeout: float = 60, **arguments: Any) -> Any:
        """Call ``function(rank, **arguments)`` on every rank; returns what rank 0 returned."""
        return self.run_everywhere(function, timeout, **arguments)[0]

    def run_everywhere(
        self, function: Callable[..., Any], timeout: float = 60, **arguments: Any
    ) -> list[Any]:
        """Run it on every rank; return what each rank returned."""
        try:
            return self._attempt(function, timeout, arguments)
        except RankCrashError as crash:
            warnings.warn(f"{function.__name__} ran again on fresh ranks: {crash}", stacklevel=3)
            return self._attempt(function, timeout, arguments)

    def _attempt(self, function: Callable[..., Any], timeout: float, arguments: dict[str, Any]) -> list[Any]:
        if self._parent is None:
            self._start()
        elif self._tired:
            self._renew()
        frame = (function.__code__.co_filename, function.__name__, arguments)
        for descriptor in self._orders:
            _write(descriptor, frame)
        try:
            answers = self._collect(timeout)
        except BaseException:
            self.stop()
            raise
        failures = [f"rank {i}:\n{answer[1]}" for i, answer in enumerate(answers) if not answer[0]]
        if failures:
            self.stop()
            crashed = any(answer[1].startswith(_KILLED) for answer in answers if not answer[0])
            raise (RankCrashError if crashed else AssertionError)("\n".join(failures))
        self._tired = any(answer[2] > _MOST_THREADS for answer in answers)
        return [answer[1] for answer in answers]

    def _renew(self) -> None:
        """Let fresh ranks take the place of those that have gathered too many threads."""
        for descriptor in self._orders:
            _write(descriptor, _RETIRE)
        try:
            self._collect(STARTUP_SECONDS)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all ranks."""
        if self._parent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._parent, signal.SIGKILL)
        for descriptor in (*self._orders, *self._answers):
            os.close(descriptor)
        self._parent, self._orders, self._answers = None, [], []
        self._tired = False

    def _start(self) -> None:
        rendezvous = tempfile.mktemp(prefix="ranks-") if self._join else ""
        theirs: list[int] = []
        for _ in range(self.world_size):
            order_read, order_write = os.pipe()
            answer_read, answer_write = os.pipe()
            theirs += [order_read, answer_write]
            self._orders.append(order_write)
            self._answers.append(answer_read)
        self._parent = nursery().fork(rendezvous, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self._collect(STARTUP_SECONDS)

    def _collect(self, timeout: float) -> list[tuple[bool, Any, int]]:
        deadline = time.monotonic() + timeout
        answers: list[tuple[bool, Any, int]] = [(False, "no answer", 0)] * self.world_size
        waiting = set(range(self.world_size))
        while waiting:
            left = max(0, deadline - time.monotonic())
            ready, _, _ = select.select([self._answers[i] for i in waiting], [], [], left)
            if not ready:
                silent = f"ranks {sorted(waiting)} did not answer in {timeout} s, or 5 s after a failure"
                told = [f"rank {i}:\n{answers[i][1]}" for i in range(self.world_size) if i not in waiting]
                raise AssertionError("\n".join([silent, *told]))
            for index in [i for i in waiting if self._answers[i] in ready]:
                answers[index] = _read(self._answers[index]) or (False, "the process ended", 0)
                waiting.discard(index)
                if not answers[index][0]:
                    deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it in vain
        return answers


class Nursery:
    """A process that has imported all that ranks need, and forks a pool's parent when asked."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)

    def fork(self, rendezvous: str, descriptors: list[int]) -> int:
        """Start the parent of ranks with these descriptors (orders and answers in turns); its process id."""
        self._socket.settimeout(STARTUP_SECONDS)
        socket.send_fds(self._socket, [rendezvous.encode() or b"-"], descriptors)
        answer = self._socket.recv(64)
        assert answer, f"the process that forks ranks ended with {self._process.wait()}"
        return int(answer)


@functools.cache
def nursery() -> Nursery:
    """That of this process; it ends with it."""
    return Nursery()


def _write(descriptor: int, value: Any) -> None:
    frame = pickle.dumps(value)
    view = memoryview(len(frame).to_bytes(8, "little") + frame)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int) -> Any:
    """The next value, ``None`` at the end."""

    def exactly(size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = os.read(descriptor, size - len(parts))
            if not part:
                return b""
            parts += part
        return parts

    header = exactly(8)
    return pickle.loads(exactly(int.from_bytes(header, "little"))) if header else None


# -- in the ranks ----------------------------------------------------------------------------------------


def _load(path: str, loaded: dict[str, ModuleType]) -> ModuleType:
    if path not in loaded:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        loaded[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[path])
    return loaded[path]


def _keep(rank: int, world_size: int, rendezvous: str, orders: int, answers: int) -> None:
    """Fork ranks one after another, until there are no more orders."""
    for generation in itertools.count():
        place = f"{rendezvous}.{generation}" if rendezvous else ""
        child = os.fork()
        if child == 0:
            os._exit(_RETIRED if _serve(rank, world_size, place, orders, answers) else 0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            _write(answers, (False, f"{_KILLED} {signal.Signals(-code).name}", 0))
        if code != _RETIRED:
            return


def _serve(rank: int, world_size: int, rendezvous: str, orders: int, answers: int) -> bool:
    """Carry out orders; whether the last of them was to retire."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if rendezvous:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
    _write(answers, (True, None, 0))
    loaded: dict[str, ModuleType] = {}
    while order := _read(orders):
        if order == _RETIRE:
            return True
        path, name, arguments = order
        try:
            value = getattr(_load(path, loaded), name)(rank, **arguments)
            _write(answers, (True, value, len(os.listdir("/proc/self/task"))))
        except Exception:
            _write(answers, (False, traceback.format_exc(), 0))
    return False


def _exact_products() -> None:
    """Make matrix products independent of the CPU and of addresses: what differs then, FSDP did."""
    spec = importlib.util.spec_from_file_location("products", PRODUCTS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    products = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(products)
    products.install("exact")


def _raise_pools(asked: socket.socket) -> None:
    """Import once, then fork a pool's parent for each request, until nobody can ask any more."""
    warnings.filterwarnings("ignore")
    faulthandler.enable()
    sys.path.insert(0, str(HERE))
    _exact_products()
    for module in ("fsdp_cases", "pytest", "torch._dynamo", "torch.distributed.checkpoint.state_dict"):
        importlib.import_module(module)
    gc.freeze()  # modules stay: a fork that looked for garbage among them would copy all of their pages
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 4096, _MOST_DESCRIPTORS)
        if not message:
            return
        _reap()
        child = os.fork()
        if child == 0:
            os.setsid()
            asked.close()
            _parent(message.decode().removeprefix("-"), descriptors)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        asked.sendall(str(child).encode())


def _reap() -> None:
    """Take note of pools that have been stopped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parent(rendezvous: str, descriptors: list[int]) -> None:
    """Fork a keeper for each rank, and wait for them."""
    world_size = len(descriptors) // 2
    for rank in range(world_size):
        if os.fork() == 0:
            orders, answers = descriptors[2 * rank : 2 * rank + 2]
            for other in set(descriptors) - {orders, answers}:
                os.close(other)
            _keep(rank, world_size, rendezvous, orders, answers)
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in range(world_size):
        os.wait()


if __name__ == "__main__":
    _raise_pools(socket.socket(fileno=int(sys.argv[1])))
