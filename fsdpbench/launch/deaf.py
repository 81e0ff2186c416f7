"""Imported first by the fork server: an interruption is for its parent, with which it ends; told to a server
that still imports, it would print where."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
