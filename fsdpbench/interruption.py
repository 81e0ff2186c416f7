"""SIGINT, SIGTERM and SIGHUP: what holds nothing ends immediately, what does ends by unwinding.

    outside of `unwinding`   the signal's own action: the kernel ends the process, whatever it imports or
                             computes just now
    inside                   the first raises `Interrupted` in the main thread: displays are restored,
                             children end, locks are released
    a second one, or
    not gone in `PATIENCE_S` the signal's own action

Children die with their parent (`lifetime.py`), so that a process that was ended leaves none behind.
Light, as what is imported before it: a command begins with it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # Python's own `signal` takes milliseconds to import
import _thread
import os
import sys
import time

PATIENCE_S = 1.0
"""How long unwinding may take: with the end itself less than the two seconds that are promised."""
_HEARD = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal told this process to end."""


class _Interruption:
    """The state of this process: whether something is to be unwound, and the signal that arrived."""

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
    """From here on this process is a command: signals end it silently from the interpreter."""
    for number in _HEARD:
        if number == _signal.SIGTERM or _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _HEARD)
    sys.unraisablehook = _unraisable


def hold() -> None:
    """Let signals wait for the next `take_over`, in the program that this process is about to become."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _HEARD)


def arrived() -> int:
    """The signal that told this process to end; 0: none did."""
    return _interruption.number


def forget() -> None:
    """Let the process live on: it is not a command's own (a test)."""
    _interruption.number = 0


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """An interruption that struck where nothing can be raised (a finalizer) would be printed."""
    if isinstance(unraisable.exc_value, Interrupted):
        os.kill(os.getpid(), _interruption.number)  # its own action since it arrived
    sys.__unraisablehook__(unraisable)


def _main_thread() -> int:
    """Its ident; `threading` may not be loaded yet, and then no other thread of Python's runs."""
    threading = sys.modules.get("threading")
    ident = threading.main_thread().ident if threading else None
    return _thread.get_ident() if ident is None else int(ident)
