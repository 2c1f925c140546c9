"""Signals that end a command. Imports only `signal`, because the command line imports this module first."""

from __future__ import annotations

import signal

EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, of `kill` and of a closed terminal. The command then removes its unfinished result, or keeps it
with --resume."""


def select_exit_signals() -> list[signal.Signals]:
    """Return the exit signals that this process does not ignore; `nohup` and a shell's `&` make it ignore some."""
    return [number for number in EXIT_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
