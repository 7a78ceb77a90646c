"""SIGTERM and SIGINT: the first begins an orderly end, further ones change nothing about it."""

from __future__ import annotations

import operator
import signal
from collections.abc import Callable, Sequence

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_do_nothing = operator.is_
"""Takes a handler's two arguments. Python runs a handler inside a handler; a built-in function has
no frame in which that could happen, so signals without end cannot use up the stack. (`SIG_IGN` is
told as an error of ours if a signal has come just before.)"""


def on_stop_signal(
    action: Callable[[signal.Signals], None], signals: Sequence[signal.Signals] = STOP_SIGNALS
) -> None:
    """Have `action` called once, with the first of the signals. Only from the main thread."""
    begun = False

    def first(number: int, _frame: object) -> None:
        nonlocal begun
        if not begun:
            begun = True
            for each in signals:
                signal.signal(each, _do_nothing)
            action(signal.Signals(number))

    for number in signals:
        signal.signal(number, first)


def hold_stop_signals() -> None:
    """For a process about to exit: Python restores the default action, which kills, before the end.

    Only from the main thread, when no other thread is left that takes signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGHUP))
