"""`python -m broker` is `weight-broker`."""

import sys

EXIT_INTERRUPTED = 130


def run() -> int:
    """The command line; Ctrl-C while it is still being imported ends it without a word."""
    try:
        if sys.argv[1:2] == ["serve"]:
            return _serve()
        from broker.cli import main

        return main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _serve() -> int:
    from broker.first_server import discard_server, fork_server

    try:
        code = fork_server()
        if code is not None:
            return code  # of the child
        from broker.cli import main

        return main()
    finally:
        discard_server()


if __name__ == "__main__":
    sys.exit(run())
