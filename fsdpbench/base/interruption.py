"""The end of processes: by SIGINT, SIGTERM and SIGHUP, and with the parent that started them.

A process that holds nothing ends immediately, one that does ends by unwinding.

    outside of `unwinding`   the signal's own action: the kernel ends the process, whatever it imports or
                             computes just now
    inside                   the first raises `Interrupted` in the main thread: displays are restored,
                             children end, locks are released
    a second one, or
    not gone in `PATIENCE_S` the signal's own action

Children die with their parent (`die_with_parent`), so that a process that was ended leaves none behind.
Light, as what is imported before it: a command begins with it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # Python's own `signal` takes milliseconds to import
import _thread
import os
import sys
import time

PATIENCE_S = 1.0
"""Seconds that unwinding may take: with the end itself less than the two that are promised."""
_HEARD = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The end of this process that a signal asks for."""


class _Interruption:
    """The state of this process: whether anything is to be unwound, and the signal that arrived."""

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
        # Not `threading`: what it locks may be held by the code that was interrupted.
        _thread.start_new_thread(self._insist, (number,))
        raise Interrupted

    def _insist(self, number: int) -> None:
        time.sleep(PATIENCE_S)
        if self.number:
            os.kill(os.getpid(), number)


class unwinding:  # noqa: N801 - used as a function; `contextlib` is not loaded yet
    """`with unwinding():` an interruption raises `Interrupted`, so that what is held here is released."""

    def __enter__(self) -> None:
        _interruption.enter()

    def __exit__(self, *exc_info: object) -> None:
        _interruption.leave()


_interruption = _Interruption()


def take_over() -> None:
    """Make this process a command: from here on signals end it silently from the interpreter."""
    for number in _HEARD:
        if number == _signal.SIGTERM or _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _HEARD)
    sys.unraisablehook = _unraisable


def hold() -> None:
    """Let signals wait for the next `take_over`, in the program that this process is about to become."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _HEARD)


def arrived() -> int:
    """Return the signal that asked this process to end; 0: none did."""
    return _interruption.number


def forget() -> None:
    """Let the process live on: it is not a command's own (a test)."""
    _interruption.number = 0


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End silently on an interruption where nothing can be raised (a finalizer): it would be printed."""
    if isinstance(unraisable.exc_value, Interrupted):
        os.kill(os.getpid(), _interruption.number)  # its own action since it arrived
    sys.__unraisablehook__(unraisable)


def _main_thread() -> int:
    """Return the main thread's ident; without `threading` loaded no other thread of Python's runs."""
    threading = sys.modules.get("threading")
    ident = threading.main_thread().ident if threading else None
    return _thread.get_ident() if ident is None else int(ident)


PARENT = "FSDPBENCH_PARENT"
"""Environment variable by which a fresh process learns the number of its parent."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have this process killed when the thread that started it ends.

    `parent`: the process of that thread. If this process has another parent already, it has ended before, and
    this process ends too.
    """
    import ctypes  # not before: a command begins with this module

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def die_with_named_parent() -> None:
    """Call `die_with_parent` in a fresh process whose parent may have left its number in the environment."""
    number = os.environ.pop(PARENT, "")
    die_with_parent(int(number) if number.isdecimal() else None)
