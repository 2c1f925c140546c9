"""Signals that end a command. Imports next to nothing: the command line needs it before everything else."""

from __future__ import annotations

import signal

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a polite kill, a closed terminal: what is half done is undone, or kept where that was asked for."""


def handle_exit_signals() -> list[signal.Signals]:
    """Those that nobody has told this process to ignore, as `nohup` and a shell's `&` do."""
    return [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
