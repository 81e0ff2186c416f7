"""Imported first by the fork server: how it is notified of its end, and how it ends.

An interruption is for its parent, with which it ends; sent to a server that still imports, it would print
where, which is why it is started with interruptions held back. At the end nothing is taken down: that would
take a third of a second, for which the reader of the command's output waits: the server has it open too.
"""

import atexit
import os
import signal

from fsdpbench.base.interruption import die_with_named_parent

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
die_with_named_parent()
atexit.register(os._exit, 0)
