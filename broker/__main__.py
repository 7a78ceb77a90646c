"""`python -m broker` is `weight-broker`."""

import sys

EXIT_INTERRUPTED = 130


def run() -> int:
    """The command line; Ctrl-C while it is still being imported ends it without a word."""
    try:
        from broker.cli import main

        return main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
