"""`python -m broker` is `weight-broker`."""

import os
import signal
import sys

EXIT_INTERRUPTED = 130


def run() -> int:
    """The command line; Ctrl-C while it is still being imported ends it without a word."""
    _open_standard_streams()
    try:
        if sys.argv[1:2] == ["serve"]:
            return _serve()
        from broker.cli import main

        return main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _open_standard_streams() -> None:
    """Where a shell has closed one (`>&-`), /dev/null takes its number before a socket does."""
    while (last := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(last)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _serve() -> int:
    """What ends a process waits until everything is imported: it must not break off half a fork,
    and where a class is being made an interrupt becomes another error."""
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it learns no exit code of a child
    from broker.first_server import discard_server, fork_server

    try:
        code = fork_server(mask)
        if code is not None:
            return code  # of the child
        from broker import service  # noqa: F401 - imported now, used later
        from broker.cli import main
        from broker.commands import serving  # noqa: F401 - as above

        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return main()
    finally:
        discard_server()


if __name__ == "__main__":
    sys.exit(run())
