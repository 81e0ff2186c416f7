"""Process termination: by SIGINT, SIGTERM and SIGHUP, and together with the parent process.

A process that holds no resources ends immediately; otherwise it unwinds first.

    outside of `unwinding`   the signal's default action: the kernel ends the process, even during an import
                             or a computation
    inside                   the first signal raises `Interrupted` in the main thread: displays are restored,
                             child processes end, locks are released
    a second one, or
    not gone in `PATIENCE_S` the signal's default action

Children die with their parent (`die_with_parent`), so a process that is killed leaves none running.
Every command imports this module first, so it imports only light modules.
"""

import _signal  # type: ignore[import-not-found]  # Python's own `signal` takes milliseconds to import
import _thread
import os
import sys
import time

PATIENCE_S = 1.0
"""The maximum seconds of unwinding; together with process exit less than the documented two."""
_HEARD = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Ends this process because of a signal."""


class _Interruption:
    """The state of this process: how deep it is in `unwinding`, and the signal that arrived."""

    def __init__(self) -> None:
        self.number = 0
        self._depth = 0
        self._before: dict[int, object] = {}

    def enter(self) -> None:
        if _thread.get_ident() != _main_thread():
            return
        self._depth += 1
        if self._depth == 1 and not self.number:
            for number in _HEARD:
                if _signal.getsignal(number) is not _signal.SIG_IGN:
                    self._before[number] = _signal.signal(number, self._raise)

    def leave(self) -> None:
        if _thread.get_ident() != _main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            while self._before:
                _signal.signal(*self._before.popitem())

    def _raise(self, number: int, frame: object) -> None:
        for heard in self._before:
            _signal.signal(heard, _signal.SIG_DFL)
        self.number = number
        # Not `threading`: the interrupted code may hold one of its locks.
        _thread.start_new_thread(self._insist, (number,))
        raise Interrupted

    def _insist(self, number: int) -> None:
        time.sleep(PATIENCE_S)
        if self.number:
            os.kill(os.getpid(), number)


class unwinding:  # noqa: N801 - used as a function; `contextlib` is not loaded yet
    """A context manager: inside, a signal raises `Interrupted`, so that resources held here are released."""

    def __enter__(self) -> None:
        _interruption.enter()

    def __exit__(self, *exc_info: object) -> None:
        _interruption.leave()


_interruption = _Interruption()


def take_over() -> None:
    """Make this process a command: signals then end it with their default action and print no traceback."""
    for number in _HEARD:
        if number == _signal.SIGTERM or _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _HEARD)
    sys.unraisablehook = _unraisable


def hold() -> None:
    """Block signals until the next `take_over`, in the program that this process is about to execute."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _HEARD)


def arrived() -> int:
    """Return the signal that is ending this process; 0 if none arrived."""
    return _interruption.number


def forget() -> None:
    """Forget the signal and continue: the process is not a command's own (in tests)."""
    _interruption.number = 0


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Exit without output on an `Interrupted` in a finalizer, which Python would print instead of raise."""
    if isinstance(unraisable.exc_value, Interrupted):
        os.kill(os.getpid(), _interruption.number)  # `_raise` has restored its default action
    sys.__unraisablehook__(unraisable)


def _main_thread() -> int:
    """Return the main thread's ident. If `threading` is not loaded, Python runs no other thread."""
    threading = sys.modules.get("threading")
    ident = threading.main_thread().ident if threading else None
    return _thread.get_ident() if ident is None else int(ident)


PARENT = "FSDPBENCH_PARENT"
"""The environment variable that gives a new process its parent's id."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have this process killed when the thread that started it ends.

    `parent`: the process of that thread. If this process already has another parent, the first has ended, and
    this process ends too.
    """
    import ctypes  # not before: a command begins with this module

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def die_with_named_parent() -> None:
    """Call `die_with_parent` in a new process, with the parent's id from the environment if it is there."""
    number = os.environ.pop(PARENT, "")
    die_with_parent(int(number) if number.isdecimal() else None)
